"""`Decision`: where a request goes and what that was decided by, in the words of `/debug/decisions`.

Rungs, from the best: `exact` (the replica's own stream told what it has), `predicted` (requests sent there lately
told), `hash` (nobody is known to have anything: bounded consistent hashing of how the prompt begins), `load` (not even
that).
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import Match
    from octavo_server.router.fleet.replica import Replica

Rung = Literal["exact", "predicted", "hash", "load"]
RUNGS: tuple[Rung, ...] = ("exact", "predicted", "hash", "load")


class CandidateCost(NamedTuple):
    """One candidate. Seconds until its first token if it were chosen, by what they are spent on; and seconds by which
    others would be held up.
    """

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
    """`candidates` in the order they were looked at; `expected_tokens`: how much of the prompt the chosen one has."""

    chosen: "Replica"
    rung: Rung
    why: str  # "least cost", "tie: least load", "bounded load", …
    candidates: tuple[CandidateCost, ...]
    expected_tokens: int

    @property
    def terms(self) -> CandidateCost:
        """Of the chosen one."""
        chosen = self.chosen
        for terms in self.candidates:
            if terms.replica is chosen:
                return terms
        raise AssertionError("what was chosen is no candidate")
