"""`RequestQueue`: requests that no replica can accept now, with limits of their number and time.

A request is *held* while its model has no replica, and *queued* while all replicas of its model are full or have an
open breaker. Code that ends a request or changes a replica must call `wake`.

Tenants take turns (start-time fair queueing, for each model): the turn of a tenant's next request is that of its
previous request plus the cost of that request. A tenant without waiting requests joins at the turn of the latest
admitted request.
"""

import asyncio
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from math import ceil
from operator import attrgetter

from octavo_engine.wire.errors import Overloaded, Unavailable

from octavo_server.http.tenant_shares import TenantShares

RETRY_AFTER_S = (1.0, 60.0)
#: The rate at which requests leave the queue is estimated from this many latest exits.
NUM_EXITS = 64
TENANT_FRACTION = 0.5
_TURN = attrgetter("turn")


class _Waiting:
    __slots__ = ("cost", "future", "has_room", "model", "tenant", "turn")

    def __init__(
        self, model: str, tenant: str, cost: float, has_room: Callable[[], bool], future: "asyncio.Future[None]"
    ) -> None:
        self.model = model
        self.tenant = tenant
        self.cost = cost
        self.turn = 0.0
        self.has_room = has_room
        self.future = future


class RequestQueue:
    """Belongs to one event loop. `observe` is called at the end of each wait with its outcome and its seconds,
    `on_change` with the model, when its first request starts to wait or its last one stops.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        observe: Callable[[str, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_waiting = max_waiting
        self._shares = TenantShares(max_waiting, TENANT_FRACTION, clock)
        self._observe = observe
        self._waiting: list[_Waiting] = []  # ordered by turn, and among equal turns by arrival
        self._turns: dict[str, dict[str, float]] = {}  # model -> tenant -> turn of its next request
        self._latest_turn: dict[str, float] = {}  # model -> turn of the latest admitted request
        self._num_by_model: Counter[str] = Counter()
        self._admitted: set[str] = set()  # models whose admitted request has not leased a replica yet
        self._exits: deque[float] = deque(maxlen=NUM_EXITS)
        self.on_change: Callable[[str], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._waiting)

    def num_by_model(self) -> Counter[str]:
        return self._num_by_model

    def has_waiting(self, model: str) -> bool:
        """True while requests for this model wait, so that a new one must queue behind them."""
        return model in self._num_by_model or model in self._admitted

    async def wait(
        self,
        model: str,
        has_room: Callable[[], bool],
        *,
        tenant: str = "",
        cost: float = 1.0,
        hold_s: float,
        why: str,
        wake_s: Callable[[], float | None] = lambda: None,
    ) -> float:
        """Wait for room on a replica and for this request's turn. Return the seconds waited.

        Raises Overloaded at once if the queue or the tenant's share is full, and Unavailable after `hold_s`. `cost`:
        estimated tokens, divided by the tenant's weight. `why`: the reason in the errors. `wake_s`: seconds until the
        model has a replica; None if it has one or if that is unknown.
        """
        self._shares.record_request(tenant)
        if not self.has_waiting(model) and has_room():
            return 0.0
        refusal = self._refusal(tenant)
        if refusal is not None:
            self._observe("refused", 0.0)
            raise Overloaded(f"{why}; {refusal}. Send the request again later.", retry_after_s=self._retry_after_s())
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        waiting = _Waiting(model, tenant, cost, has_room, loop.create_future())
        self._add(waiting)
        outcome = "left"
        try:
            await asyncio.wait([waiting.future], timeout=hold_s)
            outcome = "sent" if waiting.future.done() else "expired"
        finally:
            if waiting in self._waiting:
                self._refund(waiting)
                self._remove(waiting)
            if waiting.future.done():
                self._admitted.discard(model)
            self._exits.append(loop.time())
            self._observe(outcome, loop.time() - started_s)
            loop.call_soon(self.wake)  # admit the next request after this one has leased a replica
        if outcome == "expired":
            raise Unavailable(
                f"{why}; the request expired after {loop.time() - started_s:.1f} s in the queue (--max-hold-time). "
                "Send the request again later.",
                retry_after_s=ceil(wake_s() or 0) or self._retry_after_s(),
            )
        return loop.time() - started_s

    def wake(self) -> None:
        """Admit the next request of each model if a replica has room; the one after it waits for its lease."""
        seen = {*self._admitted}
        for waiting in [*self._waiting] if self._waiting else ():
            if waiting.model not in seen:
                seen.add(waiting.model)
                if waiting.has_room():
                    self._latest_turn[waiting.model] = waiting.turn
                    self._remove(waiting)
                    self._admitted.add(waiting.model)
                    waiting.future.set_result(None)

    def _refusal(self, tenant: str) -> str | None:
        if len(self._waiting) >= self._max_waiting:
            return f"waiting requests: {len(self._waiting)}, limit: {self._max_waiting} (--max-queued-reqs)"
        held, share = self._shares.held(tenant), self._shares.limit(tenant)
        if share is not None and held >= share:
            return f"waiting requests of this API key: {held}, limit while others wait: {share} (--max-queued-reqs / 2)"
        return None

    def _add(self, waiting: _Waiting) -> None:
        model, turns = waiting.model, self._turns.setdefault(waiting.model, {})
        waiting.turn = max(turns.get(waiting.tenant, 0.0), self._latest_turn.get(model, 0.0))
        turns[waiting.tenant] = waiting.turn + waiting.cost
        insort(self._waiting, waiting, key=_TURN)
        self._shares.add(waiting.tenant, 1)
        self._num_by_model[model] += 1
        if self._num_by_model[model] == 1:
            self.on_change(model)

    def _remove(self, waiting: _Waiting) -> None:
        model = waiting.model
        self._waiting.remove(waiting)
        self._shares.add(waiting.tenant, -1)
        self._num_by_model[model] -= 1
        if not self._num_by_model[model]:
            del self._num_by_model[model], self._turns[model]
            self._latest_turn.pop(model, None)
            self.on_change(model)

    def _refund(self, waiting: _Waiting) -> None:
        """Move the tenant's later requests forward by the cost of a request that leaves the queue unserved."""
        for other in self._waiting:
            if other.tenant == waiting.tenant and other.model == waiting.model and other.turn > waiting.turn:
                other.turn -= waiting.cost
        self._turns[waiting.model][waiting.tenant] -= waiting.cost
        self._waiting.sort(key=_TURN)

    def _retry_after_s(self) -> float:
        """Estimated seconds until the requests now in the queue have left it, at the rate of the latest exits."""
        low, high = RETRY_AFTER_S
        if len(self._exits) < 2:
            return low
        span_s = asyncio.get_running_loop().time() - self._exits[0]
        return min(high, max(low, len(self._waiting) * span_s / len(self._exits)))
