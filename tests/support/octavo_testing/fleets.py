"""Waiting for what a fleet comes to know, with a limit."""

import asyncio
from collections.abc import Callable

LIMIT_S = 15.0


async def until(holds: Callable[[], object], *, limit_s: float = LIMIT_S) -> None:
    """Looks at each turn of a small clock; what the condition was is in the traceback."""
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.005)
