"""Reads vLLM's arguments about embedding models: `runner`, `task`, `convert`."""

from collections.abc import Mapping
from typing import Any

from octavo_engine.wire.errors import StartupError

EMBED = ("embed", "embedding")


def runner_setting(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return `runner` as `task` or `convert` set it. Raises StartupError if they contradict `runner`."""
    names = [name for name in ("task", "convert") if arguments.get(name) in EMBED]
    if not names:
        return {}
    if arguments.get("runner") == "generate":
        raise StartupError(f"runner='generate' and {names[0]}='embed' contradict each other: omit one of them.")
    return {"runner": "pooling"}
