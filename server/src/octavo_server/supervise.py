"""`supervised` starts a background task that is restarted when an exception ends it.

If a background task ended silently, the server would answer its probes and do only half of its work. Each failure is
logged with its traceback; the pauses between restarts grow. A coroutine that returns is not restarted, and cancelling
the task ends the coroutine and its supervision.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from octavo_server.backoff import Backoff

logger = logging.getLogger(__name__)

LEAST_WAIT_S, MOST_WAIT_S = 0.1, 10.0


def supervised(
    name: str, make_coroutine: Callable[[], Coroutine[Any, Any, None]], backoff: Backoff | None = None
) -> "asyncio.Task[None]":
    """Start a task that runs `make_coroutine()` and calls it again for each restart. `name` appears in the log."""
    backoff = backoff or Backoff(least_s=LEAST_WAIT_S, most_s=MOST_WAIT_S)
    return asyncio.create_task(_run_supervised(name, make_coroutine, backoff), name=name)


async def cancel_tasks(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """Cancel the tasks and return when all have ended."""
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run_supervised(name: str, make_coroutine: Callable[[], Coroutine[Any, Any, None]], backoff: Backoff) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        started_s = clock()
        try:
            await make_coroutine()
        except Exception as error:  # a supervisor restarts after any error
            wait_s = backoff.next_wait_s(lasted_s=clock() - started_s)
            logger.critical("%s failed: restarting it in %.1f s", name, wait_s, exc_info=error)
            await asyncio.sleep(wait_s)
        else:
            return
