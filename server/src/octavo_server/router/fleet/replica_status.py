"""The health of one replica: `ReplicaStatus` sets its state, logs the change, and notifies the fleet."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable

import aiohttp

from octavo_server.router.fleet.endpoint import State
from octavo_server.router.fleet.polling_client import PollingClient
from octavo_server.router.fleet.replica import NEW, Replica

logger = logging.getLogger(__name__)


class ReplicaStatus:
    """`on_change` is called with the replica after each change of its status, and only then."""

    def __init__(self, replica: Replica, on_change: Callable[[Replica], None]) -> None:
        self._replica = replica
        self._on_change = on_change

    def set_state(self, state: State, why: str, *, is_new_reason: bool = False, is_unresponsive: bool = False) -> None:
        """`is_new_reason`: log the reason even if the state is unchanged."""
        replica = self._replica
        if (replica.state, replica.why, replica.is_unresponsive) == (state, why, is_unresponsive):
            return
        if replica.state != state or is_new_reason:
            logger.log(self._level(state), "replica %s is %s: %s", replica.name, state, why.removesuffix("."))
        replica.state, replica.why, replica.is_unresponsive = state, why, is_unresponsive
        self._on_change(replica)

    def set_silent(self, is_silent: bool) -> None:
        if self._replica.is_silent is not is_silent:
            self._replica.is_silent = is_silent
            self._on_change(self._replica)

    def log_first_failure(self, error: Exception, why: str) -> None:
        """Log the first failure of a replica that was never reached: enough to find a mistyped address."""
        if self._replica.why == NEW and not isinstance(error, ConnectionLost):
            logger.info("replica %s does not answer yet: %s", self._replica.name, why)

    def _level(self, state: State) -> int:
        """Log level of a change to `state`: INFO if usual, also for a new replica without a KV stream, else WARNING."""
        is_usual = state in ("loading", "exact", "gone") or (state == "blind" and self._replica.why == NEW)
        return logging.INFO if is_usual else logging.WARNING


def describe_failure(error: Exception, answer_timeout_s: float) -> str:
    """Reason that logs and `/debug/index` show for a replica that can't be reached."""
    if isinstance(error, TimeoutError):
        return f"no answer within {answer_timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, socket.gaierror) or cause.errno is None:
            return f"no connection: {cause.strerror or cause}"
        return f"no connection: {os.strerror(cause.errno)}"
    return str(error) or type(error).__name__


class ConnectionLost(Exception):
    """The router can't send requests to the replica; the message is the reason."""


class HealthCheck:
    """Requests a replica's `/health` and tolerates a few misses, as the API process may be busy.

    A miss is a status of 500 or more, a broken connection, or no response in time. Several misses in a row fail the
    check. A refused connection fails it at once: no process listens there. A failed check only stops new requests;
    requests that were sent before have connections of their own.
    """

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
