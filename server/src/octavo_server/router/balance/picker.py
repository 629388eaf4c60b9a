"""`Picker` chooses the replica of a request, and keeps the record of requests sent to each replica.

A replica is chosen by `score` if the content of a cache is known, else by consistent hashing, else by load; `rung` of
the decision names the basis. The picker never waits and gets its clock: the simulator runs this class unchanged.
"""

import zlib
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from octavo_server.router.balance import hot_prefix, score
from octavo_server.router.balance.decision import CandidateCost, Decision, Rung
from octavo_server.router.balance.hot_prefix import HotPrefixReplicator
from octavo_server.router.balance.lease import MIN_PREDICTED_S, FailedLoad, Lease
from octavo_server.router.balance.predictions import Predictions
from octavo_server.router.fleet.prefix_index import Match, PrefixIndex
from octavo_server.router.fleet.step_time_model import PRIOR_TOKEN_S, StepTimeModel

if TYPE_CHECKING:
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.prompts.prompt import Prompt
    from octavo_server.router.upstream.pool import ConnectionPool

NOTHING = Match(0)
MANY_BLOCKS = 64
_MASK = (1 << 64) - 1

CallSoon = Callable[[Callable[[], None]], object]


class Picker:
    def __init__(self, index: PrefixIndex, *, clock: Callable[[], float], call_soon: CallSoon | None = None) -> None:
        """`call_soon` defers index updates until the request was sent; without it, the next `pick` makes them."""
        self._index = index
        self._clock = clock
        self._call_soon = call_soon
        self._predictions = Predictions(index)
        self._failed_load = FailedLoad()
        self._replicator = HotPrefixReplicator()
        self._step_times: dict[frozenset[str], StepTimeModel] = {}  # served models -> their replicas' step times

    def pick(self, prompt: "Prompt", replicas: "Sequence[Replica]", exclude: "Collection[Replica]" = ()) -> Decision:
        """Choose one of `replicas` that isn't in `exclude`; there must be at least one."""
        candidates = [r for r in replicas if r not in exclude] if exclude else replicas
        assert candidates, "there is no replica to pick from"
        now = self._clock()
        self._predictions.update_index(now)
        self._failed_load.expire(now)
        costs = self._candidate_costs(prompt, candidates)
        if prompt.hashes and any(cost.replica.is_exact or cost.match.blocks for cost in costs):
            chosen, why = _least_cost(prompt, costs, now)
            if (target := self._replicator.choose_target(chosen, prompt, costs, now)) is not None:
                chosen, why = target, hot_prefix.WHY
            rung = _rung(chosen)
        elif prompt.affinity:
            chosen = _choose_bounded(prompt.affinity, costs)
            rung, why = "hash", "consistent hash, bounded load"
        else:
            chosen, rung, why = min(costs, key=lambda cost: _load(cost.replica, now)), "load", "least load"
        return Decision(chosen.replica, rung, why, costs, score.expected_tokens(prompt, chosen.match))

    def lease(self, decision: Decision, prompt: "Prompt", pool: "ConnectionPool | None" = None) -> Lease:
        self._replicator.record_dispatch(decision, prompt, self._clock())
        if self._call_soon is not None and len(prompt.hashes) >= MANY_BLOCKS:
            self._call_soon(self._update_index)
        return Lease(
            decision,
            prompt,
            predictions=self._predictions,
            failed_load=self._failed_load,
            clock=self._clock,
            pool=pool,
        )

    def _update_index(self) -> None:
        self._predictions.update_index(self._clock())

    def record_load(self, replica: "Replica") -> None:
        """Record the load that the replica's latest frame reports, and predict the blocks that it reports as coming."""
        shared = self._step_times.get(replica.models)
        if shared is None:
            shared = self._step_times[replica.models] = StepTimeModel()
        replica.local_load.record_load(replica.load, shared)
        if replica.blocks is not None and replica.blocks.coming:
            self._predict_coming(replica, replica.blocks.coming, shared.token_s)

    def _predict_coming(self, replica: "Replica", coming: Sequence[int], usual_s: float) -> None:
        lasts_s = 2 * score.queued_tokens(replica) * replica.local_load.rates.likely_token_s(usual_s)
        now = self._clock()
        self._predictions.add_reported(replica, coming, now=now, expires_at=now + max(lasts_s, MIN_PREDICTED_S))

    def _candidate_costs(self, prompt: "Prompt", candidates: "Sequence[Replica]") -> tuple[CandidateCost, ...]:
        slots = [self._predictions.slot(r) for r in candidates]
        matches = self._index.match(prompt.hashes, slots) if prompt.hashes else {}
        shared = (self._step_times.get(r.models) for r in candidates)
        usual_s = next((model.token_s for model in shared if model is not None and model.num_steps), PRIOR_TOKEN_S)
        return tuple(
            [
                score.estimate_cost(prompt, r, matches.get(slot, NOTHING), rates.likely_token_s(usual_s))
                for r, slot in zip(candidates, slots, strict=True)
                for rates in (r.local_load.rates,)
            ]
        )


def _least_cost(prompt: "Prompt", costs: tuple[CandidateCost, ...], now: float) -> tuple[CandidateCost, str]:
    """Return the cheapest candidate and the reason. Of about equal costs the longest match wins, then the least load.

    With equal costs, computing cached blocks on another replica doesn't speed up this request and delays later ones.
    """
    limit_s = min([cost.cost_s for cost in costs]) * (1 + score.TIE)
    tied = [cost for cost in costs if cost.cost_s <= limit_s]
    if len(tied) > 1:
        enough = max([cost.match.blocks for cost in tied]) * (1 - score.TIE)
        tied = [cost for cost in tied if cost.match.blocks >= enough]
    if len(tied) == 1:
        return tied[0], "least cost"
    loads = [(score.num_requests(cost.replica), cost.replica.local_load.requests.at(now)) for cost in tied]
    least = min(loads)
    coldest = [cost for cost, load in zip(tied, loads, strict=True) if load == least]
    if len(coldest) > 1:
        coldest = [min(coldest, key=lambda cost: _hash_weight(prompt.affinity, cost.replica.name))]
    return coldest[0], "tie: least load"


def _load(replica: "Replica", now: float) -> tuple[int, float, str]:
    return score.num_requests(replica), replica.local_load.requests.at(now), replica.name


def _rung(chosen: CandidateCost) -> Rung:
    match = chosen.match
    if match.predicted and match.predicted == match.blocks:
        return "predicted"
    return "exact" if chosen.replica.is_exact else "load"


def _hash_weight(affinity: int, name: str) -> int:
    """Return the weight of the replica `name` for the conversation hash `affinity`, mixed by splitmix64's finalizer."""
    mixed = (affinity ^ _seed(name)) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def _choose_bounded(affinity: int, costs: Sequence[CandidateCost]) -> CandidateCost:
    """Choose a replica for a conversation of which no replica is known to hold blocks, by bounded consistent hashing.

    Each replica gets a weight from the conversation's hash and its own name, and the highest weight wins (rendezvous
    hashing: a replica that joins or leaves moves only its own conversations). A replica above the load limit is skipped
    for the replica with the next weight, which differs from conversation to conversation; at least one is below the
    limit.
    """
    limit = _load_limit(costs)
    within = [cost for cost in costs if score.num_requests(cost.replica) <= limit]
    return max(within, key=lambda cost: _hash_weight(affinity, cost.replica.name))


def _load_limit(costs: Sequence[CandidateCost]) -> float:
    """Most requests that a replica may have to be chosen by its hash weight: 1.25 * mean of the candidates + 1."""
    return 1.25 * sum([score.num_requests(cost.replica) for cost in costs]) / len(costs) + 1


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 & _MASK
