"""`RouterMetrics`: counters and histograms of one worker, updated with a few additions per request.

`catalogue.py` lists the exposed names; `render.py` adds up the counts of several workers. `report.gauges` computes the
gauges from the router's state at a scrape.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo_server.prometheus_text import Histogram
from octavo_server.router.balance.decision import RUNGS
from octavo_server.router.observe.metrics.catalogue import BY_NAME, Labels, MetricSnapshot

if TYPE_CHECKING:
    from octavo_server.router.balance.decision import Decision
    from octavo_server.router.prompts.prompt import Prompt

#: Most values of the label `model`. Further models count as "other".
MAX_VALUES = 1000
OTHER = "other"


class _Times:
    __slots__ = ("duration", "ttft")

    def __init__(self) -> None:
        self.duration = _histogram("request_duration_seconds")
        self.ttft = _histogram("ttft_seconds")


class RouterMetrics:
    def __init__(self) -> None:
        self._requests: dict[tuple[str, int, str], int] = {}
        self._times: dict[str, _Times] = {}
        self._decisions: dict[str, int] = dict.fromkeys(RUNGS, 0)
        self._overlap_tokens: dict[str, int] = dict.fromkeys(RUNGS[:2], 0)
        self._decision_s = _histogram("decision_seconds")
        self._match_ratio = _histogram("prefix_match_ratio")
        self._prompt_tokens = self._cached_tokens = self._over_tokens = self._under_tokens = 0
        self._retries: dict[str, int] = {}
        self._waits: dict[str, Histogram] = {}
        self._stream_faults = 0

    def record_decision(self, prompt: "Prompt", decision: "Decision", decision_s: float) -> None:
        """Count a decision. Each attempt has one, retries included."""
        rung, expected, num_tokens = decision.rung, decision.expected_tokens, prompt.num_tokens
        self._decisions[rung] += 1
        self._decision_s.observe(decision_s)
        self._prompt_tokens += num_tokens
        if rung in self._overlap_tokens:
            self._overlap_tokens[rung] += expected
        if num_tokens:
            self._match_ratio.observe(expected / num_tokens)

    def record_cached_tokens(self, expected_tokens: int, cached_tokens: int) -> None:
        """Compare the cached tokens that the engine reported with the router's expectation."""
        self._cached_tokens += cached_tokens
        if expected_tokens > cached_tokens:
            self._over_tokens += expected_tokens - cached_tokens
        elif expected_tokens < cached_tokens:
            self._under_tokens += cached_tokens - expected_tokens

    def record_first_byte(self, model: str, ttft_s: float) -> None:
        self._times_of_model(model).ttft.observe(ttft_s)

    def record_end(self, *, model: str, code: int, reason: str, duration_s: float) -> None:
        """Count a request at its end. `code`: status of the response, 499 if the client left before its head."""
        times = self._times.get(model)
        if times is None:
            model, times = (model if len(self._times) < MAX_VALUES else OTHER), self._times_of_model(model)
        times.duration.observe(duration_s)
        key = model, code, reason
        self._requests[key] = self._requests.get(key, 0) + 1

    def record_retry(self, reason: str) -> None:
        self._retries[reason] = self._retries.get(reason, 0) + 1

    def record_wait(self, outcome: str, wait_s: float) -> None:
        waits = self._waits.get(outcome)
        if waits is None:
            waits = self._waits[outcome] = _histogram("queue_seconds")
        waits.observe(wait_s)

    def record_stream_faults(self, times: int) -> None:
        self._stream_faults += times

    def snapshot(self) -> MetricSnapshot:
        totals = {
            "prompt_tokens_total": self._prompt_tokens,
            "cached_tokens_total": self._cached_tokens,
            "stream_faults_total": self._stream_faults,
        }
        by_label = {
            "decisions_total": self._decisions,
            "overlap_tokens_total": self._overlap_tokens,
            "prediction_error_tokens_total": {"over": self._over_tokens, "under": self._under_tokens},
            "retries_total": self._retries,
        }
        return MetricSnapshot(
            {
                "requests_total": [((model, str(code), why), n) for (model, code, why), n in self._requests.items()],
                **{name: [((), value)] for name, value in totals.items()},
                **{name: [((label,), value) for label, value in counts.items()] for name, counts in by_label.items()},
            },
            {
                "request_duration_seconds": _series((model, times.duration) for model, times in self._times.items()),
                "ttft_seconds": _series((model, times.ttft) for model, times in self._times.items()),
                "queue_seconds": _series(self._waits.items()),
                "decision_seconds": [((), *self._decision_s.snapshot())],
                "prefix_match_ratio": [((), *self._match_ratio.snapshot())],
            },
        )

    def _times_of_model(self, name: str) -> _Times:
        times = self._times.get(name)
        if times is None:
            name = name if len(self._times) < MAX_VALUES else OTHER
            times = self._times[name] = self._times.get(name) or _Times()
        return times


def _histogram(name: str) -> Histogram:
    """Histogram of the metric `name` that only counts; `render.py` adds the name and the labels."""
    return Histogram(BY_NAME[name].bounds)


def _series(found: Iterable[tuple[str, Histogram]]) -> list[tuple[Labels, list[int], float]]:
    return [((label,), *histogram.snapshot()) for label, histogram in found]
