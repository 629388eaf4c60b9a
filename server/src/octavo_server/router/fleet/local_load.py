"""`LocalLoad`: this router's own record of a replica's work, beside the load that the replica's frames report.

A request that was just sent isn't in the reported load yet. Its tokens are *pending* until a reported load includes
it, its first byte arrives, or it ends, whichever is first. A reported load has the number of requests that the
replica has received: for each increase by one, the request that has been pending longest counts as included. For a
replica that doesn't report this number, a request counts as included in the second changed load after its dispatch.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from octavo_server.router.fleet.step_time_model import StepTimeModel

if TYPE_CHECKING:
    from octavo_server.kv.frames import ReplicaLoad
    from octavo_server.router.fleet.block_mirror import BlockMirror
    from octavo_server.router.fleet.prefix_index import Slot

LATELY_HALF_LIFE_S = 60.0
WORTH_HALF_LIFE_S = 600.0
MAX_STEP_MS = 600_000.0  # larger values, infinity and NaN are ignored as errors
_HOLD_WEIGHT = 0.1  # weight of the latest response in the moving mean `hold_s`
_LOADS_UNTIL_INCLUDED = 2


class DecayingSum:
    """A sum that halves every `half_life_s`."""

    __slots__ = ("_at", "_rate", "_value")

    def __init__(self, half_life_s: float) -> None:
        self._rate = math.log(2) / half_life_s
        self._value = self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._value, self._at = self.at(now) + amount, now

    def at(self, now: float) -> float:
        return self._value * math.exp(self._rate * (self._at - now)) if self._value else 0.0


class PredictedBlocks:
    """Predicted blocks of a replica, in the slot of the mirror that its KV stream feeds (`blocks`), or, for a polled
    replica, in a slot of predictions only.
    """

    __slots__ = ("blocks", "is_over", "repeated", "slot")

    def __init__(self, slot: "Slot", blocks: "BlockMirror | None") -> None:
        self.slot = slot
        self.blocks = blocks
        self.repeated: dict[int, int] = {}  # hash -> number of requests after the first that predict it
        self.is_over = False  # the slot was released and may belong to another replica by now

    @property
    def is_valid(self) -> bool:
        return not self.is_over if self.blocks is None else self.blocks.state != "broken"


class LocalLoad:
    def __init__(self) -> None:
        self.rates = StepTimeModel()
        self.num_in_flight = 0  # requests sent and not ended
        self.hold_s = 0.0  # mean time from a response's first token to its end; 0 until a response has ended
        self.requests = DecayingSum(LATELY_HALF_LIFE_S)  # requests sent lately
        self.worth_tokens = DecayingSum(WORTH_HALF_LIFE_S)  # prompt tokens that only this replica's cache saved
        self.predicted: PredictedBlocks | None = None
        self.pending_tokens = 0
        self.num_failed = self.failed_tokens = 0  # requests that failed but still count as load, and their tokens
        self._pending: dict[int, tuple[int, int]] = {}  # request -> its tokens, number of loads before it; oldest first
        self._num_sent = 0
        self._load: ReplicaLoad | None = None  # the latest reported load
        self._num_loads = 0
        self._latest_step = (0, 0.0)
        self._reported: set[int] = set()  # requests without a first byte that a reported load includes

    @property
    def num_unanswered(self) -> int:
        return len(self._pending) + len(self._reported)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def record_dispatch(self, compute_tokens: int) -> int:
        """Return the number of the request, to be passed to `record_first_byte`."""
        self.num_in_flight += 1
        self._num_sent += 1
        self._pending[self._num_sent] = (compute_tokens, self._num_loads)
        self.pending_tokens += compute_tokens
        return self._num_sent

    def record_first_byte(self, sent: int) -> None:
        if sent in self._pending:
            self._end_pending(sent)
        self._reported.remove(sent)

    def record_hold_time(self, took_s: float) -> None:
        self.hold_s += (_HOLD_WEIGHT if self.hold_s else 1.0) * (took_s - self.hold_s)

    def record_load(self, load: "ReplicaLoad", shared: StepTimeModel) -> None:
        """Record the load that a frame reports, and fit the step times to its latest step, once for each step.

        `shared`: step times of all replicas with the same models, which are fitted to the step too.
        """
        if load == self._load:
            return
        before = self._load.received if self._load is not None else 0
        self._load = load
        self._num_loads += 1
        for sent in [*self._included_in(load.received, before)]:
            self._end_pending(sent)
        step = load.step_tokens, load.step_ms
        if step != self._latest_step and load.step_tokens > 0 and 0 < load.step_ms < MAX_STEP_MS:
            self._latest_step = step
            shared.learn(load.step_tokens, load.step_ms / 1000, shared.token_s)
            self.rates.learn(load.step_tokens, load.step_ms / 1000, shared.token_s)

    def _included_in(self, received: int, before: int) -> Iterator[int]:
        """Pending requests that the latest load includes. `received`, `before`: count in this and the last load."""
        if received:
            yield from islice(self._pending, received - before if received >= before else received)
            return
        for sent, (_, num_loads) in self._pending.items():
            if self._num_loads - num_loads < _LOADS_UNTIL_INCLUDED:
                return
            yield sent

    def _end_pending(self, sent: int) -> None:
        tokens, _ = self._pending.pop(sent)
        self.pending_tokens -= tokens
        self._reported.add(sent)
