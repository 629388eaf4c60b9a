"""`Retries` decides whether a failed attempt of one request is retried on another replica.

A retry requires that no byte of a response has reached the client, and that the retry budget allows it.
- A request has at most `1 + --max-retries` attempts, for all kinds of failures.
- A request that two replicas lost after reading it is not retried: the request itself may have crashed them.
- 429, 502, 503 and 504 are retried while there is another replica. Without one, a 503 with `Connection: close` (the
  replica is shutting down) is retried after a short pause: a new replica may be about to start.
- 401, 403 and 404 are retried too: if another replica accepts the request, the first replica is misconfigured.
- 500 is returned to the client, as the request itself may be the cause.
- A silent replica ends the requests that it has received with 504: a retry would take as long again, and the request
  itself may have blocked the replica. A request that was not delivered to it is retried.
"""

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from octavo_server.openai.errors import ReplicaLost
from octavo_server.router.balance.balancer import ROUND_PAUSE_S, UNAVAILABLE
from octavo_server.router.upstream.connection import NotReached, StaleConnection
from octavo_server.router.upstream.headers import value_of

if TYPE_CHECKING:
    from octavo_server.router.balance.balancer import Balancer
    from octavo_server.router.balance.lease import Lease
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.upstream.connection import UpstreamResponse

REFUSALS = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
RETRIED = UNAVAILABLE | REFUSALS | {HTTPStatus.TOO_MANY_REQUESTS}
MAX_LOST = 2


REQUESTS_PER_RETRY = 5
MAX_RETRIES = 1000


class RetryBudget:
    """Bounds retries to a share of all requests (after Finagle), so that an overload is not multiplied.

    Each request deposits a fifth of a retry. A full budget (1000 retries) covers all requests on a replica that dies.
    """

    def __init__(self) -> None:
        self._deposits = MAX_RETRIES * REQUESTS_PER_RETRY

    def deposit(self) -> None:
        self._deposits = min(self._deposits + 1, MAX_RETRIES * REQUESTS_PER_RETRY)

    def withdraw(self) -> bool:
        """Charge one retry to the budget and return True. Return False if the budget is exhausted."""
        if self._deposits < REQUESTS_PER_RETRY:
            return False
        self._deposits -= REQUESTS_PER_RETRY
        return True


class Retries:
    """Retry state of one request. `tried`: replicas whose attempts failed."""

    def __init__(self, balancer: "Balancer", budget: RetryBudget, model: str, *, max_retries: int) -> None:
        self.tried: list[Replica] = []
        self._balancer = balancer
        self._model = model
        self._num_left = max_retries
        self._num_lost = 0
        self._refused_by: Replica | None = None
        self._budget = budget
        budget.deposit()

    async def should_retry_response(self, lease: "Lease", response: "UpstreamResponse") -> bool:
        """True if a retry is to be made instead of relaying this response; the retry is then charged to the budget."""
        replica = lease.replica
        if response.status not in RETRIED or not self._num_left or not await self._has_other(replica, response):
            self._judge_refusal(response.status)
            return False
        if not self._budget.withdraw():
            return False
        if response.status in REFUSALS:
            self._refused_by = replica
        self._num_left -= 1
        self.tried.append(replica)
        return True

    def should_retry_error(self, replica: "Replica", error: ReplicaLost) -> bool:
        """True if a retry is to be made after this loss of the replica; the retry is then charged to the budget."""
        self._num_lost += not isinstance(error, NotReached)
        if not self._num_left or self._num_lost >= MAX_LOST or not self._budget.withdraw():
            return False
        self._num_left -= 1
        if not isinstance(error, StaleConnection):
            self.tried.append(replica)
        return True

    async def _has_other(self, replica: "Replica", response: "UpstreamResponse") -> bool:
        if self._balancer.has_other(self._model, [*self.tried, replica]):
            return True
        is_ending = value_of(response.headers, b"connection") == b"close"
        if response.status != HTTPStatus.SERVICE_UNAVAILABLE or not is_ending:
            return False
        if replica.is_routable:  # its KV stream reports the shutdown about now
            await asyncio.sleep(ROUND_PAUSE_S)
        return not replica.is_routable

    def _judge_refusal(self, status: int) -> None:
        if self._refused_by is not None and status < 400:
            self._balancer.record_refusal(self._model, self._refused_by)


def retry_reason(error: ReplicaLost) -> str:
    return "not reached" if isinstance(error, NotReached) else "lost"
