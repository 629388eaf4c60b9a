"""`Picker`: which replica a request goes to, and the account of what was sent where.

Decides by `score` where something is known of caches, else by consistent hashing, else by load; the rung says which. It
never waits and has no clock of its own: the simulator runs this very class.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from octavo_server.router import rendezvous, score
from octavo_server.router.decision import Decision, Rung, Terms
from octavo_server.router.predictions import Prediction, Predictions
from octavo_server.router.prefix_index import Match, PrefixIndex

if TYPE_CHECKING:
    from octavo_server.router.prompt import Prompt
    from octavo_server.router.replica import Replica

NOTHING = Match(0)
MIN_PREDICTED_S = 1.0
BLIND_S = 120.0  # what was sent to a replica without a stream is believed to be there


class Picker:
    def __init__(self, index: PrefixIndex, *, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._predictions = Predictions(index)

    def pick(self, prompt: "Prompt", replicas: "Sequence[Replica]", exclude: "Collection[Replica]" = ()) -> Decision:
        """`replicas`: those that may be sent to; at least one must be left without those in `exclude`."""
        candidates = [r for r in replicas if r not in exclude] if exclude else replicas
        assert candidates, "there is no replica to pick from"
        now = self._clock()
        self._predictions.expire(now)
        terms = self._look(prompt, candidates)
        is_known = prompt.hashes and any(t.match.blocks or t.replica.is_exact for t in terms)
        if is_known:
            return self._least_cost(prompt, terms, now)
        if prompt.affinity:
            chosen = rendezvous.bounded(prompt.affinity, candidates, num_requests)
            return _decision(prompt, terms, chosen, "hash", "consistent hash, bounded load")
        chosen = min(candidates, key=lambda r: (num_requests(r), r.activity.cold_tokens.at(now), r.name))
        return _decision(prompt, terms, chosen, "load", "least load")

    def sent(self, decision: Decision, prompt: "Prompt") -> "Ticket":
        """The request goes out to the chosen replica now."""
        return Ticket(self, decision, prompt)

    def heard(self, replica: "Replica") -> None:
        """After each frame of the replica's stream."""
        replica.activity.hear(replica.load)

    def _look(self, prompt: "Prompt", candidates: "Sequence[Replica]") -> tuple[Terms, ...]:
        slots = [self._predictions.slot(r) for r in candidates]
        found = self._index.match(prompt.hashes, slots) if prompt.hashes else {}
        return tuple(
            score.terms(prompt, replica, found.get(slot, NOTHING), work(replica))
            for replica, slot in zip(candidates, slots, strict=True)
        )

    def _least_cost(self, prompt: "Prompt", terms: tuple[Terms, ...], now: float) -> Decision:
        best_s = min(t.cost_s for t in terms)
        tied = [t for t in terms if score.is_tied(t.cost_s, best_s)]
        if len(tied) == 1:
            return _decision(prompt, terms, tied[0].replica, _rung(tied[0]), "least cost")
        chosen = min(
            tied,
            key=lambda t: (
                t.replica.activity.cold_tokens.at(now),
                rendezvous.draw(prompt.affinity, t.replica.name),
            ),
        )
        return _decision(prompt, terms, chosen.replica, _rung(chosen), "tie: the coldest")


class Ticket:
    """One request that was sent, until it has ended. Both may be called in any case; what comes again is ignored."""

    __slots__ = (
        "_chosen",
        "_compute_tokens",
        "_has_begun",
        "_has_ended",
        "_picker",
        "_prediction",
        "_sent",
        "cached_tokens",
        "decision",
    )

    def __init__(self, picker: Picker, decision: Decision, prompt: "Prompt") -> None:
        now = picker._clock()
        self.decision = decision
        self.cached_tokens: int | None = None  # as the replica reported
        self._picker = picker
        self._has_begun = self._has_ended = False
        self._chosen = next(t for t in decision.candidates if t.replica is decision.chosen)
        self._compute_tokens = prompt.num_tokens - decision.expected_tokens
        activity = decision.chosen.activity
        activity.num_in_flight += 1
        activity.num_unanswered += 1
        activity.cold_tokens.add(self._compute_tokens, now)
        activity.worth_tokens.add(_saved_tokens(decision, prompt), now)
        self._sent = activity.send(self._compute_tokens)
        self._prediction = self._predict(prompt, now)

    def first_byte(self, cached_tokens: int | None) -> None:
        if self._has_begun or self._has_ended:
            return
        self._has_begun = True
        self.cached_tokens = cached_tokens
        self._answered()

    def ended(self, ok: bool) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self.decision.chosen.activity.num_in_flight -= 1
        if not self._has_begun:
            self._answered()
            if self._prediction is not None and not ok:
                self._picker._predictions.end(self._prediction)

    def _answered(self) -> None:
        activity = self.decision.chosen.activity
        activity.num_unanswered -= 1
        activity.settle(self._compute_tokens, self._sent)

    def _predict(self, prompt: "Prompt", now: float) -> Prediction | None:
        match = self._chosen.match
        new = prompt.hashes[match.blocks - match.predicted :]
        if not new:
            return None
        is_exact = self.decision.chosen.is_exact
        lasts_s = max(2 * self._chosen.cost_s, MIN_PREDICTED_S) if is_exact else BLIND_S
        return self._picker._predictions.add(self.decision.chosen, new, now + lasts_s)


def num_requests(replica: "Replica") -> int:
    """That it has to do with; of a blind one only our own are known."""
    activity, load = replica.activity, replica.load
    if not replica.is_exact:
        return activity.num_in_flight
    return max(load.running + load.waiting + activity.num_pending, activity.num_in_flight)


def work(replica: "Replica") -> score.Work:
    activity, load = replica.activity, replica.load
    if not replica.is_exact:
        return score.Work(activity.pending_tokens, activity.num_in_flight - activity.num_unanswered, None)
    return score.Work(
        load.prefill_backlog_tokens + activity.pending_tokens, load.running, load.free_blocks + load.cached_blocks
    )


def _rung(chosen: Terms) -> Rung:
    match = chosen.match
    if match.predicted and match.predicted == match.blocks:
        return "predicted"
    return "exact" if chosen.replica.is_exact else "load"


def _decision(prompt: "Prompt", terms: tuple[Terms, ...], chosen: "Replica", rung: Rung, why: str) -> Decision:
    match = next(t.match for t in terms if t.replica is chosen)
    return Decision(chosen, rung, why, terms, score.expected_tokens(prompt, match))


def _saved_tokens(decision: Decision, prompt: "Prompt") -> int:
    """Tokens that the chosen replica has and no other candidate does."""
    others = max((t.match.blocks for t in decision.candidates if t.replica is not decision.chosen), default=0)
    elsewhere = min(others * prompt.block_size, prompt.num_tokens)
    return max(decision.expected_tokens - elsewhere, 0)
