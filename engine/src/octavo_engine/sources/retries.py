"""Retries network operations with growing pauses; each attempt resumes where the last one ended.

Errors that a retry cannot fix (a wrong name, a missing token, a full disk) are not retried.
"""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.wire.errors import StartupError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRIES = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Unreachable(StartupError):
    """The source cannot be reached at the moment; an earlier complete download may be used instead."""


class Interrupted(Exception):
    """One attempt failed, and a retry may succeed; the message states the reason."""


def with_retries(
    act: Callable[[], T],
    name: str,
    *,
    progress: Callable[[], int] = lambda: 0,
    pause: Callable[[float], object] = time.sleep,
    advance: Advance = ignore_progress,
) -> T:
    """Call `act` again while it raises Interrupted; raise Unreachable after 6 attempts without progress.

    `progress` returns the bytes that are complete. `advance` is called before each attempt, as it may end them.
    """
    reached, tries = progress(), 0
    while True:
        advance(0)
        try:
            return act()
        except Interrupted as error:
            now = progress()
            reached, tries = (now, 1) if now > reached else (reached, tries + 1)
            if tries >= MAX_TRIES:
                raise Unreachable(f"{name}: {error} ({tries} attempts): check the network, then try again.") from error
            pause_s = pause_after(tries)
            logger.warning("%s: %s; retrying in %.1f s (attempt %d of %d)", name, error, pause_s, tries + 1, MAX_TRIES)
            pause(pause_s)


def pause_after(tries: int) -> float:
    """Return 50 to 100 % of a time that doubles from 1 to 30 s, at random, so that pods do not retry together."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (tries - 1))
    return longest * (1 + random.random()) / 2
