"""`LocalLoad`: what this router itself knows of a replica's work, beside what the replica's frames tell.

A request just sent isn't in the load that frames report, so its tokens are *pending* until a load has it in it, its own
first byte, or its end, whichever is first. A load says how many requests it tells of: for each more than before, the
one that is pending longest no longer is. Of a replica that doesn't say, a request is taken to be in the second load
that differs from the one before it: the first may have been made before it arrived.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from octavo_server.router.fleet.step_time_model import StepTimeModel

if TYPE_CHECKING:
    from octavo_server.kv.frames import Load
    from octavo_server.router.balance.predictions import Predicted

LATELY_HALF_LIFE_S = 60.0
WORTH_HALF_LIFE_S = 600.0
MAX_STEP_MS = 600_000.0  # what says more is no step, nor is what isn't a number
_HOLD_SHARE = 0.1  # of the latest in the mean
_LOADS_UNTIL_SURE = 2


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


class LocalLoad:
    def __init__(self) -> None:
        self.rates = StepTimeModel()
        self.num_in_flight = 0  # requests sent and not ended
        self.hold_s = 0.0  # that an answer takes after its first token, in the mean; 0: none has ended yet
        self.requests = DecayingSum(LATELY_HALF_LIFE_S)  # sent lately
        self.worth_tokens = DecayingSum(WORTH_HALF_LIFE_S)  # saved here that no other replica could have saved
        self.predicted: Predicted | None = None
        self.pending_tokens = 0
        self.num_failed = self.failed_tokens = 0  # of failed requests that still count as load
        self._pending: dict[int, tuple[int, int]] = {}  # in the order sent: tokens, loads before
        self._num_sent = 0
        self._load: Load | None = None  # the latest heard of
        self._num_loads = 0
        self._latest_step = (0, 0.0)
        self._told: set[int] = set()  # unanswered ones that a load told of

    @property
    def num_unanswered(self) -> int:
        """Of those in flight, those without a first byte."""
        return len(self._pending) + len(self._told)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def send(self, compute_tokens: int) -> int:
        """Its number, to be told to `answered`."""
        self.num_in_flight += 1
        self._num_sent += 1
        self._pending[self._num_sent] = (compute_tokens, self._num_loads)
        self.pending_tokens += compute_tokens
        return self._num_sent

    def answered(self, sent: int) -> None:
        """A request was heard of for the first time."""
        if sent in self._pending:
            self._settle(sent)
        self._told.remove(sent)

    def held(self, took_s: float) -> None:
        self.hold_s += (_HOLD_SHARE if self.hold_s else 1.0) * (took_s - self.hold_s)

    def hear(self, load: "Load", pool: StepTimeModel) -> None:
        """A frame came. One may repeat the latest step, which isn't another one to learn from.

        `pool`: the rates of all replicas alike, which learn from every one.
        """
        if load == self._load:
            return
        before = self._load.received if self._load is not None else 0
        self._load = load
        self._num_loads += 1
        for sent in [*self._told_of(load.received, before)]:
            self._settle(sent)
        step = load.step_tokens, load.step_ms
        if step != self._latest_step and load.step_tokens > 0 and 0 < load.step_ms < MAX_STEP_MS:
            self._latest_step = step
            pool.learn(load.step_tokens, load.step_ms / 1000, pool.token_s)
            self.rates.learn(load.step_tokens, load.step_ms / 1000, pool.token_s)

    def _told_of(self, received: int, before: int) -> Iterator[int]:
        """Of the requests that are pending, those that the latest load has in it."""
        if received:
            yield from islice(self._pending, received - before if received >= before else received)
            return
        for sent, (_, num_loads) in self._pending.items():
            if self._num_loads - num_loads < _LOADS_UNTIL_SURE:
                return
            yield sent

    def _settle(self, sent: int) -> None:
        tokens, _ = self._pending.pop(sent)
        self.pending_tokens -= tokens
        self._told.add(sent)
