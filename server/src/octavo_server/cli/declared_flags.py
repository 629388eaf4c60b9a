"""Adds the flags of a settings dataclass, and makes the dataclass from the given flags."""

import argparse
import json
import os
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from octavo_engine.settings.arg_types import (
    json_list,
    json_object,
    positive_seconds,
    seconds,
    size,
    size_or_auto,
    switch,
    whole_seconds,
)
from octavo_engine.settings.declare import Setting, all_settings, own_settings, records_of
from octavo_engine.wire.errors import StartupError

Record = TypeVar("Record")

_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: size,
    float: float,
    Path: Path,
    bool: switch,
    dict[str, Any]: json_object,
}
_METAVARS: dict[Any, str] = {
    **dict.fromkeys((int, size_or_auto, positive_seconds), "N"),
    **dict.fromkeys((seconds, whole_seconds), "S"),
    **dict.fromkeys((json_list, dict[str, Any]), "JSON"),
    float: "X",
    Path: "FILE",
}


def add_flags(
    parser: argparse.ArgumentParser, *records: type, but: Container[str] = (), negatable: bool = True
) -> None:
    """Add a flag for each setting of these dataclasses and the dataclasses in them, except those named in `but`.

    `negatable`: each switch also has a form with --no-, so that the command line can switch off what a file switches
    on.
    """
    groups: dict[str | None, Any] = {group.title: group for group in parser._action_groups}
    for declared in (each for record in records for each in all_settings(record) if each.name not in but):
        title, _, description = declared.group.partition(": ")
        if title not in groups:
            groups[title] = parser.add_argument_group(title, description or None)
        text = f"{declared.text} Default: {declared.default_text}."
        groups[title].add_argument(declared.flag, *declared.flags, help=text, **_value_of_flag(declared, negatable))


def record_of(record: type[Record], args: argparse.Namespace, **chosen: Any) -> Record:
    """Make the dataclass from flags, variables (StartupError if one is wrong) and the fields in `chosen`."""
    values: dict[str, Any] = {
        name: record_of(kind, args) for name, kind in records_of(record).items() if name not in chosen
    }
    for declared in own_settings(record):
        value = getattr(args, declared.name)
        if value is None and declared.name not in chosen:
            value = from_environment(declared)
        if value is not None or _unset(declared) is not None:
            values[declared.name] = tuple(value) if isinstance(value, list) else value
    return record(**values | chosen)


def flags_of(record: type, args: argparse.Namespace, *, but: Container[str] = ()) -> Iterator[str]:
    """Yield the flags that pass the values of `args` to another command, without those that have their defaults."""
    for declared in all_settings(record):
        value, flag = getattr(args, declared.name), declared.flag
        if declared.name in but or value == _unset(declared):
            continue
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        elif declared.is_list:
            yield from (flag, *map(str, value))
        else:
            yield f"{flag}={_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, list | dict):
        return json.dumps(value)
    return ",".join(value) if isinstance(value, tuple) else "auto" if value is None else str(value)


def _unset(declared: Setting) -> Any:
    """Return the value of a flag that is not given."""
    value = None if declared.env else declared.default
    return list(value) if isinstance(value, tuple) and (value or declared.is_list) else value


def _value_of_flag(declared: Setting, negatable: bool) -> dict[str, Any]:
    """Return the parameters of `add_argument` about the value."""
    values: dict[str, Any] = {"default": _unset(declared)}
    if declared.kind is bool:
        return values | {"action": argparse.BooleanOptionalAction if negatable else "store_true"}
    if declared.choices:
        return values | {"choices": declared.choices, "type": declared.value_type}
    word = _METAVARS.get(declared.parse or declared.value_type, "TEXT") if declared.metavar == "" else declared.metavar
    values |= {"type": partial(_parsed, declared), "metavar": word}
    if declared.is_list:
        values |= {"nargs": declared.nargs, "action": "extend" if declared.repeats else "store"}
    return values


def _parsed(declared: Setting, text: str) -> Any:
    """Return the value of a text. Raises ArgumentTypeError."""
    try:
        value = (declared.parse or _PARSERS.get(declared.value_type, str))(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        fault = str(error) if isinstance(error, argparse.ArgumentTypeError) else f"{text!r} is not a number"
        limit = f", and must be {declared.bounds}" if declared.bounds else ""
        raise argparse.ArgumentTypeError(fault + limit) from None
    if not declared.allows(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be {declared.bounds}")
    return value


def from_environment(declared: Setting) -> Any:
    """Return the value of a setting's variables, or None without one. Raises StartupError."""
    if declared.is_list:
        return tuple(os.environ[name] for name in declared.env if name in os.environ) or None
    for name in declared.env:
        if text := os.environ.get(name):
            try:
                return _parsed(declared, text)
            except argparse.ArgumentTypeError as error:
                raise StartupError(f"${name} is {text!r}: {error}. Correct the variable, or unset it.") from None
    return None
