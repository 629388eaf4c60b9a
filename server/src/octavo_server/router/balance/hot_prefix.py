"""`HotPrefixReplicator` lets an idle replica compute a popular prefix that a busy replica holds, within a budget.

The replica that holds a prefix is the cheapest choice for requests with it, so all of them go there while that replica
keeps up, even if other replicas idle. A copy on another replica helps only later requests, so the cost of one request
can't show its gain. A copy helps only if a prefix has more requests than one replica's share: smaller prefixes are
spread over the replicas anyway, and moving one conversation only computes its prompt again. Each prompt token found in
a cache adds a fiftieth of a token to the budget, and each token computed for a copy is charged to it. So copies cost at
most 2 % of the tokens that caches save, plus the initial budget.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo_server.router.balance import score
from octavo_server.router.fleet.local_load import LATELY_HALF_LIFE_S, DecayingSum

if TYPE_CHECKING:
    from octavo_server.router.balance.decision import CandidateCost, Decision
    from octavo_server.router.prompts.prompt import Prompt

WHY = "hot prefix: the best replica had more than its share of recent requests"
#: A prefix or a replica is hot if it had more recent requests than SHARE * (mean of the candidates) + MORE.
SHARE, MORE = 1.1, 4
EARNED = 0.02
#: Maximum of the budget in tokens, and its value at the start.
MOST_TOKENS = 4096
#: Number of prefixes whose requests are counted; beyond it, the least recently used one is dropped.
MAX_PREFIXES = 4096


class HotPrefixReplicator:
    def __init__(self) -> None:
        self._budget_tokens = float(MOST_TOKENS)
        self._requests: dict[int, DecayingSum] = {}  # hash of a prefix's last block -> its recent requests

    @property
    def num_prefixes(self) -> int:
        return len(self._requests)

    def choose_target(
        self, chosen: "CandidateCost", prompt: "Prompt", candidates: "Sequence[CandidateCost]", now: float
    ) -> "CandidateCost | None":
        """Return the idle candidate that should compute the prefix too; None if only `chosen` should hold it."""
        if (requests := self._requests.get(_prefix(chosen, prompt))) is None:
            return None
        recent = [cost.replica.local_load.requests.at(now) for cost in candidates]
        limit = SHARE * sum(recent) / len(recent) + MORE
        if requests.at(now) <= limit or chosen.replica.local_load.requests.at(now) <= limit:
            return None
        least = candidates[recent.index(min(recent))]
        is_idle = score.num_requests(least.replica) == 0
        return least if is_idle and 0 < _lost_tokens(prompt, chosen, least) <= self._budget_tokens else None

    def record_dispatch(self, decision: "Decision", prompt: "Prompt", now: float) -> None:
        self._budget_tokens += EARNED * decision.expected_tokens
        used = decision.chosen_cost
        if decision.why == WHY:
            best = max(decision.candidates, key=lambda cost: cost.match.blocks)
            self._budget_tokens -= _lost_tokens(prompt, best, used)
            used = best
        if used.match.blocks:
            self._count(_prefix(used, prompt), now)
        self._budget_tokens = min(self._budget_tokens, float(MOST_TOKENS))

    def _count(self, prefix: int, now: float) -> None:
        requests = self._requests.pop(prefix, None) or DecayingSum(LATELY_HALF_LIFE_S)
        requests.add(1, now)
        self._requests[prefix] = requests
        if len(self._requests) > MAX_PREFIXES:
            del self._requests[next(iter(self._requests))]


def _prefix(cost: "CandidateCost", prompt: "Prompt") -> int:
    return prompt.hashes[cost.match.blocks - 1] if cost.match.blocks else 0


def _lost_tokens(prompt: "Prompt", best: "CandidateCost", other: "CandidateCost") -> int:
    return score.expected_tokens(prompt, best.match) - score.expected_tokens(prompt, other.match)
