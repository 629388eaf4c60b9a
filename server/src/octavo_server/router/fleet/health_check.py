"""`HealthCheck` requests a replica's `/health` and tolerates a few misses, as the API process may be busy.

A miss is a status of 500 or more, a broken connection, or no response in time. Several misses in a row fail the check.
A refused connection fails it at once: no process listens there. A failed check only stops new requests; requests that
were sent before have connections of their own.
"""

import asyncio
import errno
from collections.abc import Callable

import aiohttp

from octavo_server.router.fleet.polling_client import PollingClient


class ConnectionLost(Exception):
    """The router can't send requests to the replica; the message is the reason."""


class HealthCheck:
    def __init__(self, client: PollingClient, *, timeout_s: float, pause_s: float, max_misses: int) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._max_misses = max_misses

    async def run(self, set_silent: Callable[[bool], None]) -> None:
        """Return when the replica is healthy. Raises ConnectionLost after `max_misses` misses in a row.

        `set_silent` is called with True at a miss that is not the last one, with False before the return.
        """
        miss = await self._find_miss()
        for _ in range(1, self._max_misses):
            if miss is None:
                break
            set_silent(True)
            await asyncio.sleep(self._pause_s)
            miss = await self._find_miss()
        if miss is not None:
            raise ConnectionLost(f"/health failed {self._max_misses} times in a row: {miss}")
        set_silent(False)

    async def _find_miss(self) -> str | None:
        try:
            async with self._client.open("/health", self._timeout_s) as answer:
                return f"status {answer.status}" if answer.status >= 500 else None
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            if error.os_error.errno == errno.ECONNREFUSED:
                raise ConnectionLost("/health: connection refused") from None
            return str(error)
        except (aiohttp.ClientError, OSError) as error:
            return str(error) or type(error).__name__
