"""Reads the settings of LoRA adapters: `lora_modules` in vLLM's forms, and the limits that they share."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

import msgspec

from octavo_engine.settings.records import LoRAModule
from octavo_engine.wire.errors import StartupError

#: The names and hashes of all adapters fit into a frame of the KV stream.
MAX_NAMES, MAX_NAME_BYTES = 4096, 128
_FORMS = '"name=folder" or {"name": "...", "path": "..."}'


def lora_modules(value: Any) -> tuple[LoRAModule, ...]:
    """Read adapters: texts `name=path`, JSON objects, mappings, or a list of these. Raises StartupError."""
    return tuple(_read_all(value))


def check_num_adapters(num_adapters: int) -> None:
    """Raise StartupError for too many names."""
    if num_adapters > MAX_NAMES:
        raise StartupError(f"{num_adapters} adapters exceed the limit of {MAX_NAMES}: load fewer at a time.")


def check_adapter_name(name: str, taken: Collection[str] = ()) -> None:
    """Raise StartupError if the name is too long, or is the name of the served model or of another adapter."""
    if name in taken:
        raise StartupError(f"{name!r} is the name of the served model, or of another adapter: choose another name.")
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        raise StartupError(
            f"the name {name!r} of an adapter has {size} bytes; the limit is {MAX_NAME_BYTES}: choose a shorter one."
        )


def _read_all(value: Any) -> Iterator[LoRAModule]:
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _read_all(entry)
    elif isinstance(value, LoRAModule):
        yield value
    elif isinstance(value, Mapping):
        yield _from_mapping(value)
    elif isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        yield from _read_all(_parse(value))
    elif value is not None:
        name, separator, path = str(value).partition("=")
        if not (name and separator and path):
            raise StartupError(f"lora_modules={value!r} names no adapter: use {_FORMS}.")
        yield LoRAModule(name=name, path=path)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"lora_modules={text!r} is not valid JSON: {error}: use {_FORMS}.") from None


def _from_mapping(value: Mapping[str, Any]) -> LoRAModule:
    known = {field.name for field in fields(LoRAModule)}
    if unknown := sorted(value.keys() - known):
        raise StartupError(f"lora_modules has no field {unknown[0]!r}: use {', '.join(sorted(known))}.")
    try:
        module = msgspec.convert(dict(value), LoRAModule)
    except msgspec.ValidationError as error:
        raise StartupError(f"lora_modules={dict(value)!r}: {error}: use {_FORMS}.") from None
    if not module.name or not module.path:
        raise StartupError(f"lora_modules={dict(value)!r} has an empty name or path: use {_FORMS}.")
    return module
