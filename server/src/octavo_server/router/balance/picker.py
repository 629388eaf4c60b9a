"""`Picker`: which replica a request goes to, and the account of what was sent where.

Decides by `score` where something is known of caches, else by consistent hashing, else by load; the rung says which. It
never waits and has no clock of its own: the simulator runs this very class.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from octavo_server.router.balance import consistent_hash, hot_prefix, score
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

Soon = Callable[[Callable[[], None]], object]


class Picker:
    def __init__(self, index: PrefixIndex, *, clock: Callable[[], float], soon: Soon | None = None) -> None:
        """`soon`: calls what needn't hold up the request that is on its way out; else it is done for the next one."""
        self._index = index
        self._clock = clock
        self._soon = soon
        self._predictions = Predictions(index)
        self._failed_load = FailedLoad()
        self._evening_out = HotPrefixReplicator()
        self._pools: dict[frozenset[str], StepTimeModel] = {}  # by what replicas serve: those alike take alike long

    def pick(self, prompt: "Prompt", replicas: "Sequence[Replica]", exclude: "Collection[Replica]" = ()) -> Decision:
        """`replicas`: those that may be sent to; at least one must be left without those in `exclude`."""
        candidates = [r for r in replicas if r not in exclude] if exclude else replicas
        assert candidates, "there is no replica to pick from"
        now = self._clock()
        self._predictions.settle(now)
        self._failed_load.expire(now)
        terms = self._look(prompt, candidates)
        if prompt.hashes and any(t.replica.is_exact or t.match.blocks for t in terms):
            chosen, why = _least_cost(prompt, terms, now)
            if (instead := self._evening_out.instead_of(chosen, prompt, terms, now)) is not None:
                chosen, why = instead, hot_prefix.WHY
            rung = _rung(chosen)
        elif prompt.affinity:
            chosen, rung, why = consistent_hash.bounded(prompt.affinity, terms), "hash", "consistent hash, bounded load"
        else:
            chosen, rung, why = min(terms, key=lambda t: _load(t.replica, now)), "load", "least load"
        return Decision(chosen.replica, rung, why, terms, score.expected_tokens(prompt, chosen.match))

    def lease(self, decision: Decision, prompt: "Prompt", pool: "ConnectionPool | None" = None) -> Lease:
        """Account for a request that is sent to the chosen replica now."""
        self._evening_out.sent(decision, prompt, self._clock())
        if self._soon is not None and len(prompt.hashes) >= MANY_BLOCKS:
            self._soon(self._settle)
        return Lease(
            decision,
            prompt,
            predictions=self._predictions,
            failed_load=self._failed_load,
            clock=self._clock,
            pool=pool,
        )

    def _settle(self) -> None:
        self._predictions.settle(self._clock())

    def heard(self, replica: "Replica") -> None:
        """After each frame of the replica's stream."""
        pool = self._pools.get(replica.models)
        if pool is None:
            pool = self._pools[replica.models] = StepTimeModel()
        replica.activity.hear(replica.load, pool)
        if replica.blocks is not None and replica.blocks.coming:
            self._expect(replica, replica.blocks.coming, pool.token_s)

    def _expect(self, replica: "Replica", coming: Sequence[int], usual_s: float) -> None:
        lasts_s = 2 * score.queued_tokens(replica) * replica.activity.rates.likely_token_s(usual_s)
        now = self._clock()
        self._predictions.told(replica, coming, now=now, expires_at=now + max(lasts_s, MIN_PREDICTED_S))

    def _look(self, prompt: "Prompt", candidates: "Sequence[Replica]") -> tuple[CandidateCost, ...]:
        slots = [self._predictions.slot(r) for r in candidates]
        found = self._index.match(prompt.hashes, slots) if prompt.hashes else {}
        pools = (self._pools.get(r.models) for r in candidates)
        usual_s = next((pool.token_s for pool in pools if pool is not None and pool.num_steps), PRIOR_TOKEN_S)
        return tuple(
            [
                score.terms(prompt, r, found.get(slot, NOTHING), rates.likely_token_s(usual_s))
                for r, slot in zip(candidates, slots, strict=True)
                for rates in (r.activity.rates,)
            ]
        )


def _least_cost(prompt: "Prompt", terms: tuple[CandidateCost, ...], now: float) -> tuple[CandidateCost, str]:
    """Of those that cost the same, one that finds as much as any: what is computed again is of no use to this request,
    and holds up the next ones.
    """
    costs = [t.cost_s for t in terms]
    limit_s = min(costs) * (1 + score.TIE)
    tied = [t for t, cost_s in zip(terms, costs, strict=True) if cost_s <= limit_s]
    if len(tied) > 1:
        enough = max([t.match.blocks for t in tied]) * (1 - score.TIE)
        tied = [t for t in tied if t.match.blocks >= enough]
    if len(tied) == 1:
        return tied[0], "least cost"
    loads = [(score.num_requests(t.replica), t.replica.activity.requests.at(now)) for t in tied]
    least = min(loads)
    coldest = [t for t, load in zip(tied, loads, strict=True) if load == least]
    if len(coldest) > 1:
        coldest = [min(coldest, key=lambda t: consistent_hash.hash_weight(prompt.affinity, t.replica.name))]
    return coldest[0], "tie: least load"


def _load(replica: "Replica", now: float) -> tuple[int, float, str]:
    return score.num_requests(replica), replica.activity.requests.at(now), replica.name


def _rung(chosen: CandidateCost) -> Rung:
    match = chosen.match
    if match.predicted and match.predicted == match.blocks:
        return "predicted"
    return "exact" if chosen.replica.is_exact else "load"
