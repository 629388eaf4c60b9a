"""Seeded workloads of chat requests for several replicas. Open loop: the times don't depend on the responses.

Only the next turn of a conversation waits for the answer before it, which it contains. Rates are multiples of the
replicas' capacity without a cache, so that a policy without hits runs at its limit.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

WORDS = (
    *("paper", "page", "read", "book", "leaf", "price", "ink", "press", "type", "letter", "margin", "spine"),
    *("river", "stone", "cloud", "garden", "winter", "summer", "bread", "glass", "table", "window", "music", "green"),
)
MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the time `at_s` to send it, the system prompt of its conversation, and the user's message."""

    at_s: float
    conversation: int
    system: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`load` is a multiple of the replicas' capacity without a cache. `active` conversations take turns.

    A conversation has `turns` turns of `user_words` words; its system prompt is one of `num_systems`, of `system_words`
    words. `blocks` is the size of each replica's KV cache, small where blocks must be evicted.
    """

    name: str
    load: float
    active: int
    turns: int
    num_systems: int
    system_words: int
    user_words: int
    blocks: int = 600
    policies: Sequence[str] = field(default=("octavo", "round robin", "sglang"))

    def requests(self, num: int, rate: float, seed: int) -> list[Turn]:
        dice = random.Random(f"{self.name} {seed}")
        systems = [_words(dice, self.system_words) for _ in range(self.num_systems)]
        at_s = 0.0
        found = []
        for conversation in self._order(dice, num):
            at_s += dice.expovariate(rate * self.load)
            system = systems[conversation % len(systems)]
            found.append(Turn(at_s, conversation, system, _words(dice, self.user_words)))
        return found

    def _order(self, dice: random.Random, num: int) -> Iterator[int]:
        """Yield the conversation of each request."""
        left = dict.fromkeys(range(self.active), self.turns)
        started = self.active
        for _ in range(num):
            conversation = dice.choice([*left])
            yield conversation
            left[conversation] -= 1
            if not left[conversation]:
                del left[conversation]
                left[started] = self.turns
                started += 1


def _words(dice: random.Random, count: int) -> str:
    """Return random words that begin with a number, so that texts differ in their first block."""
    return f"{dice.randrange(10**6)} " + " ".join(dice.choices(WORDS, k=count))


MULTI_TURN = Workload(
    name="multi-turn", load=0.9, active=10, turns=6, num_systems=1, system_words=60, user_words=70,
    policies=("octavo", "octavo x2", "round robin", "sglang"),
)  # fmt: skip
SHARED = Workload(
    name="shared prefix", load=0.9, active=8, turns=1, num_systems=8, system_words=400, user_words=40,
    policies=("octavo", "octavo x2", "round robin", "sglang"),
)  # fmt: skip
HOT = Workload(name="hot prefix", load=1.5, active=1, turns=1, num_systems=1, system_words=500, user_words=40)
PRESSURE = Workload(
    name="eviction pressure", load=0.9, active=20, turns=6, num_systems=1, system_words=60, user_words=100,
    blocks=128, policies=("octavo",),
)  # fmt: skip
WORKLOADS = (MULTI_TURN, SHARED, HOT, PRESSURE)


def distinct(num: int, words: int, seed: int) -> list[str]:
    """Return prompts without a common prefix, to measure the capacity without a cache."""
    dice = random.Random(f"distinct {seed}")
    return [_words(dice, words) for _ in range(num)]
