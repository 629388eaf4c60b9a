"""`ReplicaStatus` sets the state of one replica, logs the change, and notifies the fleet."""

import logging
import os
import socket
from collections.abc import Callable

import aiohttp

from octavo_server.router.fleet.endpoint import State
from octavo_server.router.fleet.health_check import ConnectionLost
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
