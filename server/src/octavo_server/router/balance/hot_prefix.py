"""`HotPrefixReplicator` copies a popular prefix from a busy replica to an idle one, within a budget.

Whoever has a prefix is the cheapest for it, so a hot one stays where it is while that replica keeps up, and the others
have nothing to do. To compute it elsewhere pays later, if at all, so it can't be found in a request's own cost. It can
pay only for a prefix that is asked for more than one replica's share: load of many smaller ones evens out by where each
of them is, and who moves a conversation computes it anew for nothing. Each token found in a cache earns a fiftieth of
one; computing one again to even out is paid from that. So it costs at most 2 % of what caches save, and what may be
saved up.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo_server.router.balance import score
from octavo_server.router.fleet.local_load import LATELY_HALF_LIFE_S, DecayingSum

if TYPE_CHECKING:
    from octavo_server.router.balance.decision import CandidateCost, Decision
    from octavo_server.router.prompts.prompt import Prompt

WHY = "evened out: another had more than its share lately"
SHARE, MORE = 1.1, 4  # of the mean of requests that candidates were sent lately, and so many: siblings stay together
EARNED = 0.02
MOST_TOKENS = 4096  # saved up; what there is in the beginning
MAX_PREFIXES = 4096  # that are counted; those not asked for longest are forgotten


class HotPrefixReplicator:
    def __init__(self) -> None:
        self._budget_tokens = float(MOST_TOKENS)
        self._asked: dict[int, DecayingSum] = {}  # last block found -> requests lately

    @property
    def num_prefixes(self) -> int:
        return len(self._asked)

    def instead_of(
        self, chosen: "CandidateCost", prompt: "Prompt", candidates: "Sequence[CandidateCost]", now: float
    ) -> "CandidateCost | None":
        if (asked := self._asked.get(_prefix(chosen, prompt))) is None:
            return None
        lately = [t.replica.activity.requests.at(now) for t in candidates]
        most = SHARE * sum(lately) / len(lately) + MORE
        if asked.at(now) <= most or chosen.replica.activity.requests.at(now) <= most:
            return None
        least = candidates[lately.index(min(lately))]
        is_idle = score.num_requests(least.replica) == 0
        return least if is_idle and 0 < _lost_tokens(prompt, chosen, least) <= self._budget_tokens else None

    def sent(self, decision: "Decision", prompt: "Prompt", now: float) -> None:
        self._budget_tokens += EARNED * decision.expected_tokens
        found = decision.terms
        if decision.why == WHY:
            best = max(decision.candidates, key=lambda t: t.match.blocks)
            self._budget_tokens -= _lost_tokens(prompt, best, found)
            found = best
        if found.match.blocks:
            self._count(_prefix(found, prompt), now)
        self._budget_tokens = min(self._budget_tokens, float(MOST_TOKENS))

    def _count(self, prefix: int, now: float) -> None:
        asked = self._asked.pop(prefix, None) or DecayingSum(LATELY_HALF_LIFE_S)
        asked.add(1, now)
        self._asked[prefix] = asked
        if len(self._asked) > MAX_PREFIXES:
            del self._asked[next(iter(self._asked))]


def _prefix(there: "CandidateCost", prompt: "Prompt") -> int:
    """What is found of the prompt, by the hash of its last block; 0 if nothing is."""
    return prompt.hashes[there.match.blocks - 1] if there.match.blocks else 0


def _lost_tokens(prompt: "Prompt", there: "CandidateCost", here: "CandidateCost") -> int:
    return score.expected_tokens(prompt, there.match) - score.expected_tokens(prompt, here.match)
