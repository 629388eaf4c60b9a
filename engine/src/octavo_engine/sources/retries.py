"""Trying again what a network broke: with growing pauses, anew from where the last try came to.

What another try can't help (a wrong name, a missing token, a full disk) isn't tried again.
"""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from octavo_engine.wire.errors import StartupError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRIES = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Unreachable(StartupError):
    """The source can't be asked at the moment: what was fetched before may do."""


class Interrupted(Exception):
    """One try failed in a way that the next needn't; the message says how."""


def with_retries(
    act: Callable[[], T],
    name: str,
    *,
    progress: Callable[[], int] = lambda: 0,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """`act` raises Interrupted to be called again. Tries count from the last that got on: `progress` tells bytes."""
    reached, tries = progress(), 0
    while True:
        try:
            return act()
        except Interrupted as error:
            now = progress()
            reached, tries = (now, 1) if now > reached else (reached, tries + 1)
            if tries >= MAX_TRIES:
                raise Unreachable(
                    f"{name}: {error} (tried {tries} times): check the network, then try again."
                ) from error
            pause_s = pause_after(tries)
            logger.warning("%s: %s; trying again in %.1f s (%d of %d)", name, error, pause_s, tries + 1, MAX_TRIES)
            pause(pause_s)


def pause_after(tries: int) -> float:
    """Between half and all of a time that doubles, so that many pods don't come back at once."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (tries - 1))
    return longest * (1 + random.random()) / 2
