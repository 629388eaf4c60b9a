"""`Decision`: the chosen replica and the basis of the choice, in the words of `/debug/decisions`.

`rung` names the basis of the choice, from the best to the worst: `exact` (the replica's KV stream reports its blocks),
`predicted` (the replica should hold the blocks of requests that were just sent to it), `hash` (no replica is known to
hold any block: bounded consistent hashing of the prompt's beginning), `load` (the least loaded replica).
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import Match
    from octavo_server.router.fleet.replica import Replica

Rung = Literal["exact", "predicted", "hash", "load"]
RUNGS: tuple[Rung, ...] = ("exact", "predicted", "hash", "load")


class CandidateCost(NamedTuple):
    """Cost of a candidate: its seconds to the first token, by cause, and `delay_s`, the delay of other requests."""

    replica: "Replica"
    match: "Match"
    prefill_s: float
    queue_s: float
    evict_s: float
    decode_s: float
    delay_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.prefill_s + self.queue_s + self.evict_s + self.decode_s

    @property
    def cost_s(self) -> float:
        return self.prefill_s + self.queue_s + self.evict_s + self.decode_s + self.delay_s


class Decision(NamedTuple):
    """`expected_tokens`: prompt tokens expected in the cache of the chosen replica."""

    chosen: "Replica"
    rung: Rung
    why: str  # reason of the choice: "least cost", "tie: least load", …
    candidates: tuple[CandidateCost, ...]
    expected_tokens: int

    @property
    def chosen_cost(self) -> CandidateCost:
        chosen = self.chosen
        for cost in self.candidates:
            if cost.replica is chosen:
                return cost
        raise AssertionError("the chosen replica is not a candidate")
