"""`EveningOut`: sends a request whose replica had more than its share lately to an idle one that had least, within a
budget.

Whoever has a prefix is the cheapest for it, so a hot one stays where it is while that replica keeps up, and the others
have nothing to do. To compute it elsewhere pays later, if at all, so it can't be found in a request's own cost. Each
token found in a cache earns a fiftieth of one; computing one again to even out is paid from that. So it costs at most
2 % of what caches save, and what may be saved up.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo_server.router import score

if TYPE_CHECKING:
    from octavo_server.router.decision import Decision, Terms
    from octavo_server.router.prompt import Prompt

WHY = "evened out: another had more than its share lately"
SHARE, MORE = 1.1, 4  # of the mean of requests that candidates were sent lately, and so many: siblings stay together
EARNED = 0.02
MOST_TOKENS = 4096  # saved up; what there is in the beginning


class EveningOut:
    def __init__(self) -> None:
        self._budget_tokens: float = MOST_TOKENS

    def instead_of(
        self, chosen: "Terms", prompt: "Prompt", candidates: "Sequence[Terms]", now: float
    ) -> "Terms | None":
        lately = [t.replica.activity.requests.at(now) for t in candidates]
        if chosen.replica.activity.requests.at(now) <= SHARE * sum(lately) / len(lately) + MORE:
            return None
        least = candidates[lately.index(min(lately))]
        is_idle = score.num_requests(least.replica) == 0
        return least if is_idle and 0 < _lost_tokens(prompt, chosen, least) <= self._budget_tokens else None

    def sent(self, decision: "Decision", prompt: "Prompt") -> None:
        self._budget_tokens += EARNED * decision.expected_tokens
        if decision.why == WHY:
            best = max(decision.candidates, key=lambda t: t.match.blocks)
            self._budget_tokens -= _lost_tokens(prompt, best, decision.terms)
        self._budget_tokens = min(self._budget_tokens, MOST_TOKENS)


def _lost_tokens(prompt: "Prompt", there: "Terms", here: "Terms") -> int:
    return score.expected_tokens(prompt, there.match) - score.expected_tokens(prompt, here.match)
