"""`Activity`: what this router itself knows of a replica's work, beside what the replica's frames tell.

A request just sent isn't in the load that frames report: the first frame after sending may have been made before it
arrived. So its tokens stay *pending* until the second frame, its own first byte, or its end, whichever is first.
"""

import math
from typing import TYPE_CHECKING

from octavo_server.router.rates import Rates

if TYPE_CHECKING:
    from octavo_server.kv.frames import Load
    from octavo_server.router.predictions import Predicted

COLD_HALF_LIFE_S = 60.0
WORTH_HALF_LIFE_S = 600.0


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
        self.cold_tokens = Decayed(COLD_HALF_LIFE_S)  # sent without being expected in its cache
        self.worth_tokens = Decayed(WORTH_HALF_LIFE_S)  # saved here that no other replica could have saved
        self.predicted: Predicted | None = None
        self._num_frames = 0
        self._latest_step = (0, 0.0)
        self._tokens = [0, 0]  # pending since the latest frame, and since the one before it
        self._requests = [0, 0]

    @property
    def pending_tokens(self) -> int:
        return self._tokens[0] + self._tokens[1]

    @property
    def num_pending(self) -> int:
        return self._requests[0] + self._requests[1]

    def send(self, tokens: int) -> int:
        """When that was, to be told to `settle`."""
        self._tokens[0] += tokens
        self._requests[0] += 1
        return self._num_frames

    def settle(self, tokens: int, sent: int) -> None:
        """The request was heard of, once: it isn't pending any more, if it still was."""
        age = self._num_frames - sent
        if age < len(self._tokens):
            self._tokens[age] -= tokens
            self._requests[age] -= 1

    def hear(self, load: "Load") -> None:
        """A frame came. A heartbeat repeats the latest step, which isn't another one to learn from."""
        self._num_frames += 1
        self._tokens = [0, self._tokens[0]]
        self._requests = [0, self._requests[0]]
        step = load.step_tokens, load.step_ms
        if step != self._latest_step and min(step) > 0:
            self._latest_step = step
            self.rates.learn(load.step_tokens, load.step_ms / 1000)
