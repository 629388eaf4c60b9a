"""`Lease`: a request's hold on one replica, from the choice of the replica to the end of the attempt.

While the lease is held, the request counts as load of the replica, and the router predicts that the replica holds the
prompt's blocks. The first byte and the end may be recorded several times and in any order; each counts once.
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
#: Time for which a polled replica is predicted to hold the blocks of a request that was sent to it.
POLLED_S = 120.0
#: Time for which a failed request still counts as load.
FAILED_LOAD_S = 5.0

Outcome = Literal["ok", "failed", "unknown"]


class FailedLoad:
    """Counts a failed request as load for `FAILED_LOAD_S`: otherwise a replica that fails at once would look idle."""

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
    """`pool`: connections to the replica; None in a simulation. `decision_s`: duration of the choice. `waited_s`: time
    that the request waited in the queue before the choice.
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
        load = decision.chosen.local_load
        load.requests.add(1, now)
        if unique := _unique_tokens(decision, prompt):
            load.worth_tokens.add(unique, now)
        self._compute_tokens = prompt.num_tokens - decision.expected_tokens
        self._pending_id = load.record_dispatch(self._compute_tokens)
        self._prediction = self._predict(prompt, now)

    @property
    def replica(self) -> "Replica":
        return self.decision.chosen

    @property
    def host(self) -> bytes:
        assert self.pool is not None, "a simulated lease sends nothing"
        return self.pool.host

    async def send(self, request: bytes, limit_s: float) -> "UpstreamResponse":
        """Send the request and return when the response head has arrived. Raises ReplicaLost or ReplicaTimeout."""
        assert self.pool is not None, "a simulated lease sends nothing"
        self.response = await self.pool.send(request, limit_s)
        return self.response

    def record_first_byte(self, *, is_error: bool = False) -> None:
        """Record the response's first byte. `is_error`: its status is 400 or more, so the prompt was not computed."""
        if self._has_begun or self._has_ended:
            return
        self._has_begun = True
        self.replica.local_load.record_first_byte(self._pending_id)
        if is_error:
            self._end_prediction()

    def release(self, outcome: Outcome) -> None:
        """End the attempt. If no first byte was recorded, its predicted blocks stay only if `outcome` is `ok`."""
        if self._has_ended:
            return
        self._has_ended = True
        load = self.replica.local_load
        load.num_in_flight -= 1
        if outcome == "ok":  # subtract the expected TTFT: an unstreamed response has its first byte at its end
            load.record_hold_time(max(self._clock() - self._sent_at - self.decision.chosen_cost.ttft_s, 0.0))
        elif outcome == "failed":
            self._failed_load.add(load, self._compute_tokens, self._clock())
        if not self._has_begun:
            self.replica.local_load.record_first_byte(self._pending_id)
            if outcome != "ok":
                self._end_prediction()

    def _end_prediction(self) -> None:
        if self._prediction is not None:
            self._predictions.end(self._prediction)

    def _predict(self, prompt: "Prompt", now: float) -> Prediction | None:
        cost = self.decision.chosen_cost
        match = cost.match
        new = prompt.hashes[match.blocks - match.predicted :]
        if not new:
            return None
        lasts_s = max(2 * cost.ttft_s, MIN_PREDICTED_S) if cost.replica.is_exact else POLLED_S
        return self._predictions.add(cost.replica, new, now + lasts_s)


def _unique_tokens(decision: Decision, prompt: "Prompt") -> int:
    if not decision.expected_tokens:
        return 0
    others = max((c.match.blocks for c in decision.candidates if c.replica is not decision.chosen), default=0)
    return max(decision.expected_tokens - others * prompt.block_size, 0)
