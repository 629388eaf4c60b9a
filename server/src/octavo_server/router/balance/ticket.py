"""`Ticket`: one request that was sent to a replica, until it has ended.

Whoever relays the request tells it what happened, in any order and as often as it likes; each thing counts once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo_server.router.balance.decision import Decision
from octavo_server.router.balance.predictions import Prediction, Predictions

if TYPE_CHECKING:
    from octavo_server.router.prompts.prompt import Prompt

MIN_PREDICTED_S = 1.0
BLIND_S = 120.0  # what was sent to a replica without a stream is believed to be there


class Ticket:
    __slots__ = (
        "_clock",
        "_has_begun",
        "_has_ended",
        "_prediction",
        "_predictions",
        "_sent",
        "_sent_at",
        "cached_tokens",
        "decision",
    )

    def __init__(
        self, decision: Decision, prompt: "Prompt", predictions: Predictions, clock: Callable[[], float]
    ) -> None:
        now = clock()
        self.decision = decision
        self.cached_tokens: int | None = None  # as the replica reported
        self._predictions = predictions
        self._clock = clock
        self._sent_at = now
        self._has_begun = self._has_ended = False
        activity = decision.chosen.activity
        activity.requests.add(1, now)
        if unique := _unique_tokens(decision, prompt):
            activity.worth_tokens.add(unique, now)
        self._sent = activity.send(prompt.num_tokens - decision.expected_tokens)
        self._prediction = self._predict(prompt, now)

    def first_byte(self, cached_tokens: int | None) -> None:
        if not self._has_begun and not self._has_ended:
            self._has_begun = True
            self.cached_tokens = cached_tokens
            self._answered()

    def ended(self, ok: bool) -> None:
        """A request that fails before its first byte may not have computed anything."""
        if self._has_ended:
            return
        self._has_ended = True
        activity = self.decision.chosen.activity
        activity.num_in_flight -= 1
        if ok:  # the first byte of an answer that isn't streamed is its end, so what was expected has to do
            activity.held(max(self._clock() - self._sent_at - self.decision.terms.ttft_s, 0.0))
        if self._has_begun:
            return
        self._answered()
        if self._prediction is not None and not ok:
            self._predictions.end(self._prediction)

    def _answered(self) -> None:
        self.decision.chosen.activity.answered(self._sent)

    def _predict(self, prompt: "Prompt", now: float) -> Prediction | None:
        terms = self.decision.terms
        match = terms.match
        new = prompt.hashes[match.blocks - match.predicted :]
        if not new:
            return None
        lasts_s = max(2 * terms.ttft_s, MIN_PREDICTED_S) if terms.replica.is_exact else BLIND_S
        return self._predictions.add(terms.replica, new, now + lasts_s)


def _unique_tokens(decision: Decision, prompt: "Prompt") -> int:
    """Tokens that the chosen replica has and no other candidate does."""
    if not decision.expected_tokens:
        return 0
    others = max((t.match.blocks for t in decision.candidates if t.replica is not decision.chosen), default=0)
    return max(decision.expected_tokens - others * prompt.block_size, 0)
