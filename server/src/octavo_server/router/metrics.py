"""`RouterMetrics`: what requests and decisions show, counted as it happens; a few dictionary entries per request.

Two halves. Counters and histograms are kept here and add up over workers (`observed`, `add`). Gauges are read from the
router's state when somebody scrapes, as are totals that others keep. The list is in `metric_list.py`; nothing else is
exposed, and no label takes more than `MAX_VALUES` values: models beyond count as "other".
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from octavo_server.exposition import Histogram, family_text, label_text
from octavo_server.router.metric_list import FAMILIES, PREFIX, Family

if TYPE_CHECKING:
    from octavo_server.router.decision import Decision
    from octavo_server.router.prompt import Prompt

MAX_VALUES = 1000
OTHER = "other"

Labels = tuple[str, ...]
Gauges = Mapping[str, Mapping[Labels, float]]


class Observed(msgspec.Struct):
    """The counters and histograms of one worker."""

    counts: dict[str, list[tuple[Labels, float]]]
    histograms: dict[str, list[tuple[Labels, list[int], float]]]


class RouterMetrics:
    def __init__(self) -> None:
        self._counts: dict[str, dict[Labels, float]] = {f.name: {} for f in FAMILIES if f.kind == "counter"}
        self._histograms: dict[str, dict[Labels, Histogram]] = {f.name: {} for f in FAMILIES if f.kind == "histogram"}
        self._models: set[str] = set()
        for family in FAMILIES:
            if not family.labels:
                self._start(family)

    def decided(self, prompt: "Prompt", decision: "Decision", decision_s: float) -> None:
        """Once for each attempt: a retry is decided anew."""
        self._count("decisions_total", (decision.rung,))
        self._observe("decision_seconds", (), decision_s)
        if prompt.num_tokens:
            self._observe("prefix_match_ratio", (), decision.expected_tokens / prompt.num_tokens)
        if decision.rung == "exact" or decision.rung == "predicted":
            self._count("overlap_tokens_total", (decision.rung,), decision.expected_tokens)
        self._count("prompt_tokens_total", (), prompt.num_tokens)

    def reported(self, expected_tokens: int, cached_tokens: int) -> None:
        """What the engine then said of the prompt: the proof, or not, of what the router believed."""
        self._count("cached_tokens_total", (), cached_tokens)
        if expected_tokens > cached_tokens:
            self._count("prediction_error_tokens_total", ("over",), expected_tokens - cached_tokens)
        elif expected_tokens < cached_tokens:
            self._count("prediction_error_tokens_total", ("under",), cached_tokens - expected_tokens)

    def first_byte(self, model: str, ttft_s: float) -> None:
        self._observe("ttft_seconds", (self._model(model),), ttft_s)

    def ended(self, *, model: str, code: int, reason: str, duration_s: float) -> None:
        """Once for each request, whatever became of it. `code`: of the answer; 499: the client left before it."""
        name = self._model(model)
        self._count("requests_total", (name, str(code), reason))
        self._observe("request_duration_seconds", (name,), duration_s)

    def retried(self, reason: str) -> None:
        self._count("retries_total", (reason,))

    def waited(self, outcome: str, wait_s: float) -> None:
        """A request came out of the queue."""
        self._observe("queue_seconds", (outcome,), wait_s)

    def streams_failed(self, times: int) -> None:
        self._count("stream_faults_total", (), times)

    def observed(self) -> Observed:
        return Observed(
            {name: [*series.items()] for name, series in self._counts.items()},
            {name: [(k, *h.observed()) for k, h in series.items()] for name, series in self._histograms.items()},
        )

    def add(self, other: Observed) -> None:
        for name, series in other.counts.items():
            for labels, value in series:
                self._count(name, labels, value)
        for name, found in other.histograms.items():
            for labels, counts, total in found:
                self._histogram(name, labels).add(counts, total)

    def text(self, gauges: Gauges) -> str:
        return "".join(
            family_text(PREFIX + family.name, family.kind, family.help, self._series(family, gauges))
            for family in FAMILIES
        )

    def _series(self, family: Family, gauges: Gauges) -> Iterable[str]:
        name = PREFIX + family.name
        if family.kind == "histogram":
            return (histogram.text(name) for histogram in self._histograms[family.name].values())
        samples = gauges.get(family.name) or self._counts.get(family.name, {})
        return (_sample(family, labels, value) for labels, value in samples.items())

    def _start(self, family: Family) -> None:
        """What has no labels is shown from the beginning, as 0."""
        if family.kind == "counter":
            self._count(family.name, (), 0)
        elif family.kind == "histogram":
            self._histogram(family.name, ())

    def _count(self, name: str, labels: Labels, times: float = 1) -> None:
        series = self._counts[name]
        series[labels] = series.get(labels, 0) + times

    def _observe(self, name: str, labels: Labels, value: float) -> None:
        self._histogram(name, labels).observe(value)

    def _histogram(self, name: str, labels: Labels) -> Histogram:
        found = self._histograms[name].get(labels)
        if found is None:
            family = _BY_NAME[name]
            text = label_text(dict(zip(family.labels, labels, strict=True)))
            found = self._histograms[name][labels] = Histogram((PREFIX + name,), family.bounds, text)
        return found

    def _model(self, name: str) -> str:
        if name not in self._models:
            if len(self._models) >= MAX_VALUES:
                return OTHER
            self._models.add(name)
        return name


def _sample(family: Family, labels: Labels, value: float) -> str:
    text = label_text(dict(zip(family.labels, labels, strict=True)))
    return f"{PREFIX}{family.name}{f'{{{text}}}' if text else ''} {value}\n"


_BY_NAME = {family.name: family for family in FAMILIES}
