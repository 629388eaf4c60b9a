"""`Lease`: one replica that a request holds, from the choice of the replica to the end of the attempt.

While it is held, the request counts as load of the replica and its prompt blocks are predicted to be there. Each event
may be reported several times and in any order; it counts once.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from octavo_server.router.balance.decision import Decision
from octavo_server.router.balance.predictions import Prediction, Predictions

if TYPE_CHECKING:
    from octavo_server.router.fleet.local_load import LocalLoad
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.prompts.prompt import Prompt
    from octavo_server.router.upstream.connection import UpstreamResponse
    from octavo_server.router.upstream.pool import ConnectionPool

MIN_PREDICTED_S = 1.0
#: How long blocks sent to a replica without a KV stream are predicted to stay there.
POLLED_S = 120.0
#: How long a failed request still counts as load.
FAILED_LOAD_S = 5.0

Outcome = Literal["ok", "failed", "unknown"]


class FailedLoad:
    """Failed requests, counted as load for `FAILED_LOAD_S`: without that, a replica that fails at once looks idle."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, LocalLoad, int]] = deque()

    def add(self, load: "LocalLoad", tokens: int, now: float) -> None:
        load.num_failed += 1
        load.failed_tokens += tokens
        self._entries.append((now + FAILED_LOAD_S, load, tokens))

    def expire(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now:
            _, load, tokens = self._entries.popleft()
            load.num_failed -= 1
            load.failed_tokens -= tokens


class Lease:
    """`pool`: connections to the replica; None in a simulation. `decision_s`: the time that the choice took.
    `waited_s`: the time that the request waited in the queue for this replica.
    """

    decision_s = 0.0
    waited_s = 0.0

    def __init__(
        self,
        decision: Decision,
        prompt: "Prompt",
        *,
        predictions: Predictions,
        failed_load: FailedLoad,
        clock: Callable[[], float],
        pool: "ConnectionPool | None" = None,
    ) -> None:
        now = clock()
        self.decision = decision
        self.pool = pool
        self.response: UpstreamResponse | None = None
        self._predictions = predictions
        self._failed_load = failed_load
        self._clock = clock
        self._sent_at = now
        self._has_begun = self._has_ended = False
        load = decision.chosen.activity
        load.requests.add(1, now)
        if unique := _unique_tokens(decision, prompt):
            load.worth_tokens.add(unique, now)
        self._compute_tokens = prompt.num_tokens - decision.expected_tokens
        self._pending_id = load.send(self._compute_tokens)
        self._prediction = self._predict(prompt, now)

    @property
    def replica(self) -> "Replica":
        return self.decision.chosen

    @property
    def host(self) -> bytes:
        assert self.pool is not None, "a simulated lease sends nothing"
        return self.pool.host

    async def send(self, request: bytes, limit_s: float) -> "UpstreamResponse":
        """Return once the head of the response is there. Raises ReplicaLost or ReplicaTimeout."""
        assert self.pool is not None, "a simulated lease sends nothing"
        self.response = await self.pool.send(request, limit_s)
        return self.response

    def record_first_byte(self, *, is_error: bool = False) -> None:
        """`is_error`: the status is 400 or more, so nothing of the prompt was computed."""
        if self._has_begun or self._has_ended:
            return
        self._has_begun = True
        self.replica.activity.answered(self._pending_id)
        if is_error:
            self._end_prediction()

    def release(self, outcome: Outcome) -> None:
        """End the attempt. One that fails before its first byte may not have computed anything."""
        if self._has_ended:
            return
        self._has_ended = True
        load = self.replica.activity
        load.num_in_flight -= 1
        if outcome == "ok":  # the first byte of an answer that isn't streamed is its end: subtract the expected time
            load.held(max(self._clock() - self._sent_at - self.decision.terms.ttft_s, 0.0))
        elif outcome == "failed":
            self._failed_load.add(load, self._compute_tokens, self._clock())
        if not self._has_begun:
            self.replica.activity.answered(self._pending_id)
            if outcome != "ok":
                self._end_prediction()

    def _end_prediction(self) -> None:
        if self._prediction is not None:
            self._predictions.end(self._prediction)

    def _predict(self, prompt: "Prompt", now: float) -> Prediction | None:
        terms = self.decision.terms
        match = terms.match
        new = prompt.hashes[match.blocks - match.predicted :]
        if not new:
            return None
        lasts_s = max(2 * terms.ttft_s, MIN_PREDICTED_S) if terms.replica.is_exact else POLLED_S
        return self._predictions.add(terms.replica, new, now + lasts_s)


def _unique_tokens(decision: Decision, prompt: "Prompt") -> int:
    """Cached prompt tokens that the chosen replica has and no other candidate does."""
    if not decision.expected_tokens:
        return 0
    others = max((t.match.blocks for t in decision.candidates if t.replica is not decision.chosen), default=0)
    return max(decision.expected_tokens - others * prompt.block_size, 0)
