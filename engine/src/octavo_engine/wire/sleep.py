"""The parts of an engine's memory that sleep gives back, under vLLM's names."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from octavo_engine.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo_engine.settings.config import EngineConfig

MemoryTag = Literal["weights", "kv_cache"]
SleepMode = Literal["abort", "wait"]
#: All tags, in the order in which an engine wakes them: weights that can't be loaded leave the KV cache asleep.
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
#: Seconds after which a client should retry a request that a sleeping engine rejected.
WAKE_RETRY_S = 5.0
ASLEEP = "The engine sleeps: wake it with wake_up (POST /wake_up)."

_MODES: tuple[SleepMode, ...] = get_args(SleepMode)
_TAGS_OF_LEVEL: dict[int, tuple[MemoryTag, ...]] = {1: ("kv_cache",), 2: MEMORY_TAGS}


def tags_of_level(level: int) -> tuple[MemoryTag, ...]:
    """Return the memory that a level of sleep gives back. Raises InvalidRequest."""
    if level not in _TAGS_OF_LEVEL:
        raise InvalidRequest(
            f"level={level} is not supported: level 1 gives back the KV cache, level 2 the weights, too.", param="level"
        )
    return _TAGS_OF_LEVEL[level]


def tags_to_wake(tags: Iterable[str] | None) -> list[MemoryTag]:
    """Return the tags in the order in which they wake; all for None. Raises InvalidRequest for an unknown one."""
    chosen = set(MEMORY_TAGS) if tags is None else set(tags)
    unknown = sorted(chosen - set(MEMORY_TAGS))
    if unknown:
        raise InvalidRequest(f"tags={unknown[0]} is unknown: use {' or '.join(MEMORY_TAGS)}.", param="tags")
    return [tag for tag in MEMORY_TAGS if tag in chosen]


def check_mode(mode: str) -> SleepMode:
    """Check the mode, which decides about running requests. Raises InvalidRequest."""
    for known in _MODES:
        if mode == known:
            return known
    raise InvalidRequest(
        f"mode={mode} is not supported: abort ends running requests, wait lets them finish.", param="mode"
    )


def check_enabled(config: "EngineConfig") -> None:
    """Raises InvalidRequest for an engine without sleep mode."""
    if not config.enable_sleep_mode:
        raise InvalidRequest("Sleep mode is off: start the engine with enable_sleep_mode (--enable-sleep-mode).")
