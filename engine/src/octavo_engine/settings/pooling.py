"""Reads vLLM's arguments about embedding models: `runner`, `task`, `convert`, `pooler_config`, `hf_overrides`."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from octavo_engine.settings.records import PoolerConfig
from octavo_engine.wire.errors import StartupError

EMBED = ("embed", "embedding")
_FIELDS = tuple(f.name for f in fields(PoolerConfig))
#: vLLM's older names of the fields of its pooler configuration.
_OLD_FIELDS = {"seq_pooling_type": "pooling_type", "normalize": "use_activation"}


def runner_setting(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return `runner` as `task` or `convert` set it. Raises StartupError if they contradict `runner`."""
    names = [name for name in ("task", "convert") if arguments.get(name) in EMBED]
    if not names:
        return {}
    if arguments.get("runner") == "generate":
        raise StartupError(f"runner='generate' and {names[0]}='embed' contradict each other: omit one of them.")
    return {"runner": "pooling"}


def pooler_config(value: Any) -> PoolerConfig | None:
    """Read the settings from JSON text or a mapping; None: as the model has them. Raises StartupError."""
    if value is None or isinstance(value, PoolerConfig):
        return value
    given = {_OLD_FIELDS.get(name, name): entry for name, entry in _as_mapping("pooler_config", value).items()}
    kind = given.get("pooling_type")
    if isinstance(kind, str):
        given["pooling_type"] = kind.upper()
    if unknown := sorted(given.keys() - set(_FIELDS)):
        raise StartupError(f"pooler_config has no field {unknown[0]!r} in this version: use {', '.join(_FIELDS)}.")
    try:
        return msgspec.convert(given, PoolerConfig)
    except msgspec.ValidationError as error:
        raise StartupError(f"pooler_config={value!r}: {error}: pooling_type is LAST, CLS or MEAN.") from None


def hf_overrides(value: Any) -> dict[str, Any]:
    """Read the keys of config.json to replace, from JSON text or a mapping. Raises StartupError."""
    return {} if value is None else dict(_as_mapping("hf_overrides", value))


def _as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{name}={value!r} is no JSON: {error}.") from None
    if not isinstance(given, Mapping):
        raise StartupError(f"{name}={value!r} must be a JSON object.")
    return given
