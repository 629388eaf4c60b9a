"""Admission of requests to the engine's queue. This module reads a clock, but has no tasks or timers.

The engine holds the queue and divides its time between tenants; this module counts the requests in the queue. A request
beyond the limits is rejected with the seconds after which it should be retried.
"""

from collections import deque
from collections.abc import Callable
from types import TracebackType

from octavo_engine.wire.errors import InvalidRequest, Overloaded

from octavo_server.config import QueueLimits
from octavo_server.http.tenant_shares import TenantShares

NUM_ENDS = 128  # latest ends of sequences, from whose rate `retry_after_s` is computed
RETRY_AFTER_S = (1.0, 60.0)
TENANT_FRACTION = 0.5


class Admission:
    """Counts the requests in the engine's queue. `max_running`: sequences that the engine runs at once."""

    def __init__(
        self,
        limits: QueueLimits,
        *,
        max_running: int,
        clock: Callable[[], float],
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits = limits
        self.num_seqs = 0
        self.num_waiting_tokens = 0
        self._max_running = max_running
        self._clock = clock
        self._on_refusal = on_refusal
        self._shares = TenantShares(limits.max_num_queued_reqs or 0, TENANT_FRACTION, clock)
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)

    def check(self, tenant: str, *, num_seqs: int = 1) -> None:
        """Check the limits. Raises Overloaded if the queue has no room for `num_seqs` more sequences, InvalidRequest if
        even an empty queue has too little room."""
        self.check_size(num_seqs)
        self._shares.record_request(tenant)
        refusal = self._refusal(tenant, num_seqs)
        if refusal is not None:
            self._on_refusal()
            raise Overloaded(refusal, retry_after_s=self.retry_after_s())

    def admit(self, tenant: str, *, num_seqs: int, num_tokens: int) -> "AdmittedPrompt":
        self.num_seqs += num_seqs
        self.num_waiting_tokens += num_tokens
        self._shares.add(tenant, num_seqs)
        return AdmittedPrompt(self, tenant, num_seqs, num_tokens)

    def retry_after_s(self) -> float:
        """Estimate the seconds, 1 to 60, until all waiting sequences have started, from the rate of the latest ends."""
        low, high = RETRY_AFTER_S
        if len(self._ends) < 2:
            return low
        span_s = self._clock() - self._ends[0]
        waiting = max(1, self.num_seqs - self._max_running)
        return min(high, max(low, waiting * span_s / len(self._ends)))

    def check_size(self, num_seqs: int) -> None:
        """Check the number of sequences of one request. Raises InvalidRequest if it exceeds the size of the queue."""
        limit = self.limits.max_num_queued_reqs
        if limit is not None and num_seqs > max(limit, 1):
            raise InvalidRequest(
                f"The request asks for {num_seqs} sequences (prompts times n); the server queues at most {limit}: send "
                "fewer, or start the server with a larger --max-num-queued-reqs.",
                param="n",
            )

    def _refusal(self, tenant: str, num_seqs: int) -> str | None:
        limits = self.limits
        per_key, held = limits.max_requests_per_key, self._shares.held(tenant)
        if limits.max_num_queued_reqs is not None and self.num_seqs + num_seqs > limits.max_num_queued_reqs:
            asked = f", this request has {num_seqs}" if num_seqs > 1 else ""
            in_progress = f"{self.num_seqs} requests are in progress{asked}"
            return _full(in_progress, limits.max_num_queued_reqs, "max-num-queued-reqs")
        share = None if limits.max_num_queued_reqs is None else self._shares.limit(tenant)
        if share is not None and held + num_seqs > share:
            in_progress = f"{held} requests of this API key are in progress, this request has {num_seqs}"
            return _full(f"{in_progress}, and others use the server", share, "max-num-queued-reqs / 2")
        if limits.max_num_queued_tokens is not None and self.num_waiting_tokens >= limits.max_num_queued_tokens:
            tokens = f"{self.num_waiting_tokens} prompt tokens are waiting"
            return _full(tokens, limits.max_num_queued_tokens, "max-num-queued-tokens")
        if per_key is not None and tenant and held >= per_key:
            return _full(f"{held} requests of this API key are in progress", per_key, "max-requests-per-key")
        return None

    def _start(self, admitted: "AdmittedPrompt") -> None:
        self.num_waiting_tokens -= admitted.num_tokens

    def _leave(self, admitted: "AdmittedPrompt") -> None:
        self.num_seqs -= admitted.num_seqs
        self._ends.extend([self._clock()] * admitted.num_seqs)
        self._shares.add(admitted.tenant, -admitted.num_seqs)


class AdmittedPrompt:
    """One prompt in the engine: it waits until `start` is called, and has ended when `leave` is called, or its `with`
    block ends."""

    def __init__(self, admission: Admission, tenant: str, num_seqs: int, num_tokens: int) -> None:
        self.tenant = tenant
        self.num_seqs = num_seqs
        self.num_tokens = num_tokens
        self.has_started = False
        self._has_left = False
        self._admission = admission

    def start(self) -> None:
        if not self.has_started:
            self.has_started = True
            self._admission._start(self)

    def leave(self) -> None:
        self.start()
        if not self._has_left:
            self._has_left = True
            self._admission._leave(self)

    def __enter__(self) -> "AdmittedPrompt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


def _full(what: str, limit: int, flag: str) -> str:
    return f"The server is busy: {what}, the limit is {limit} (--{flag}). Send the request again later."
