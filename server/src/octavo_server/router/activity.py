"""`Activity`: what this router itself knows of a replica's work, beside what the replica's frames tell.

A request just sent isn't in the load that frames report: the first frame after sending may have been made before it
arrived. So its tokens stay *pending* until the second frame that tells another load, its own first byte, or its end,
whichever is first. A frame with the load of the one before (the engine is amid a long step) says nothing of it.
"""

import math
from typing import TYPE_CHECKING

from octavo_server.router.rates import Rates

if TYPE_CHECKING:
    from octavo_server.kv.frames import Load
    from octavo_server.router.predictions import Predicted

LATELY_HALF_LIFE_S = 60.0
WORTH_HALF_LIFE_S = 600.0
MAX_STEP_MS = 600_000.0  # what says more is no step, nor is what isn't a number
_HOLD_SHARE = 0.1  # of the latest in the mean


class Decayed:
    """A sum that halves every `half_life_s`."""

    __slots__ = ("_at", "_rate", "_value")

    def __init__(self, half_life_s: float) -> None:
        self._rate = math.log(2) / half_life_s
        self._value = self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._value, self._at = self.at(now) + amount, now

    def at(self, now: float) -> float:
        return self._value * math.exp(self._rate * (self._at - now)) if self._value else 0.0


class Activity:
    def __init__(self) -> None:
        self.rates = Rates()
        self.num_in_flight = 0  # requests sent and not ended
        self.num_unanswered = 0  # of those, without a first byte
        self.hold_s = 0.0  # that an answer takes after its first token, in the mean; 0: none has ended yet
        self.requests = Decayed(LATELY_HALF_LIFE_S)  # sent lately
        self.worth_tokens = Decayed(WORTH_HALF_LIFE_S)  # saved here that no other replica could have saved
        self.predicted: Predicted | None = None
        self._load: Load | None = None  # the latest heard of
        self._num_frames = 0
        self._latest_step = (0, 0.0)
        self._tokens = [0, 0]  # pending since the latest frame, and since the one before it
        self._requests = [0, 0]
        self._cached_tokens = 0  # expected to be found by those without a first byte

    @property
    def pending_tokens(self) -> int:
        return self._tokens[0] + self._tokens[1]

    @property
    def num_pending(self) -> int:
        return self._requests[0] + self._requests[1]

    @property
    def mean_cached_tokens(self) -> float:
        return self._cached_tokens / self.num_unanswered if self.num_unanswered else 0.0

    def send(self, compute_tokens: int, cached_tokens: int) -> int:
        """When that was, to be told to `answered`."""
        self.num_in_flight += 1
        self.num_unanswered += 1
        self._cached_tokens += cached_tokens
        self._tokens[0] += compute_tokens
        self._requests[0] += 1
        return self._num_frames

    def answered(self, compute_tokens: int, cached_tokens: int, sent: int) -> None:
        """A request was heard of for the first time."""
        self.num_unanswered -= 1
        self._cached_tokens -= cached_tokens
        age = self._num_frames - sent
        if age < len(self._tokens):
            self._tokens[age] -= compute_tokens
            self._requests[age] -= 1

    def held(self, took_s: float) -> None:
        self.hold_s += (_HOLD_SHARE if self.hold_s else 1.0) * (took_s - self.hold_s)

    def hear(self, load: "Load", pool: Rates) -> None:
        """A frame came. One may repeat the latest step, which isn't another one to learn from.

        `pool`: the rates of all replicas alike, which learn from every one.
        """
        if load == self._load:
            return
        self._load = load
        self._num_frames += 1
        self._tokens = [0, self._tokens[0]]
        self._requests = [0, self._requests[0]]
        step = load.step_tokens, load.step_ms
        if step != self._latest_step and load.step_tokens > 0 and 0 < load.step_ms < MAX_STEP_MS:
            self._latest_step = step
            pool.learn(load.step_tokens, load.step_ms / 1000, pool.token_s)
            self.rates.learn(load.step_tokens, load.step_ms / 1000, pool.token_s)
