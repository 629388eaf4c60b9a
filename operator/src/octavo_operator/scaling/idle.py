"""`IdleTime`: how long a service has had no request, by counters that only grow.

Samples of running requests would miss short ones. So each router counts the requests of a service since its start, and
a gap in the reports does not matter if the same starts of the routers report the same counts after it.
"""

from collections.abc import Mapping

from octavo_operator.scaling.service_load import ServiceLoad


class IdleTime:
    """Belongs to one service. Times are monotonic seconds."""

    def __init__(self, now_s: float) -> None:
        self.quiet_since_s = now_s
        self._requests: Mapping[str, tuple[str, int]] | None = None
        self._is_known = False

    def observe(self, load: ServiceLoad | None, now_s: float) -> None:
        """`load`: None if it is unknown."""
        self._is_known = load is not None
        if load is None:
            return
        if load.unfinished or load.requests != self._requests:
            self.quiet_since_s = now_s
        self._requests = load.requests

    def seconds(self, now_s: float) -> float | None:
        """Seconds without a request until now; None if the present load is unknown."""
        return now_s - self.quiet_since_s if self._is_known else None
