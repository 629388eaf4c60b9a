"""`RequestQueue`: requests that no replica can take now, in the order in which they came. Bounded in number and time.

A request waits while its model has no replica (`held`), or all of them are full or cut off (`queued`). Whoever changes
something that could let one go on calls `poke`.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from octavo_engine.wire.errors import Overloaded, Unavailable

RETRY_AFTER_S = (1.0, 60.0)
NUM_EXITS = 64  # so many of the latest give the rate


class _Waiting:
    __slots__ = ("future", "has_place", "model")

    def __init__(self, model: str, has_place: Callable[[], bool], future: "asyncio.Future[None]") -> None:
        self.model = model
        self.has_place = has_place
        self.future = future


class RequestQueue:
    """Belongs to one event loop. `observe` is told how each wait ended and how long it was."""

    def __init__(self, *, max_waiting: int, observe: Callable[[str, float], None]) -> None:
        self._max_waiting = max_waiting
        self._observe = observe
        self._waiting: deque[_Waiting] = deque()
        self._of_model: Counter[str] = Counter()
        self._exits: deque[float] = deque(maxlen=NUM_EXITS)

    def __len__(self) -> int:
        return len(self._waiting)

    def of_model(self) -> Counter[str]:
        return self._of_model

    def is_asked_for(self, model: str) -> bool:
        """Somebody waits already: who comes now has to get in line."""
        return model in self._of_model

    async def wait(self, model: str, has_place: Callable[[], bool], *, until_s: float, why: str) -> None:
        """Until there is a place and it is this one's turn. Raises Overloaded at once where the room is full, and
        Unavailable at `until_s`."""
        if not self.is_asked_for(model) and has_place():
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        if len(self._waiting) >= self._max_waiting:
            self._observe("refused", 0.0)
            message = f"{why}; waiting: {len(self._waiting)}, the limit is {self._max_waiting} (--max-queued-reqs)."
            raise Overloaded(f"{message} Send the request again later.", retry_after_s=self._retry_after_s())
        waiting = _Waiting(model, has_place, loop.create_future())
        self._waiting.append(waiting)
        self._of_model[model] += 1
        outcome = "left"
        try:
            async with asyncio.timeout_at(until_s):
                await waiting.future
            outcome = "sent"
        except TimeoutError:
            outcome = "expired"
            raise Unavailable(
                f"{why}, and none came in {loop.time() - now:.1f} s (--max-hold-time). Send the request again later.",
                retry_after_s=self._retry_after_s(),
            ) from None
        finally:
            self._leave(waiting)
            self._exits.append(loop.time())
            self._observe(outcome, loop.time() - now)

    def poke(self) -> None:
        """Lets the first of each model go on for which there is a place, one at a time: it takes the place."""
        looked_at: set[str] = set()
        for waiting in [*self._waiting] if self._waiting else ():
            if waiting.model not in looked_at and not waiting.future.done():
                looked_at.add(waiting.model)
                if waiting.has_place():
                    self._leave(waiting)
                    waiting.future.set_result(None)

    def _leave(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._of_model[waiting.model] -= 1
            if not self._of_model[waiting.model]:
                del self._of_model[waiting.model]

    def _retry_after_s(self) -> float:
        """How long those that wait will take to go on, at the rate of the latest."""
        low, high = RETRY_AFTER_S
        if len(self._exits) < 2:
            return low
        span_s = asyncio.get_running_loop().time() - self._exits[0]
        return min(high, max(low, len(self._waiting) * span_s / len(self._exits)))
