"""Renders the router's metrics in Prometheus' text format: counts summed over its workers, and gauges of its state."""

from collections.abc import Iterable, Mapping

from octavo_server.prometheus_text import Histogram, family_text, line_start
from octavo_server.router.observe.metrics.catalogue import BY_NAME, FAMILIES, PREFIX, Family, Labels, MetricSnapshot

#: Family -> labels -> value, for families whose values are read at the scrape.
Gauges = Mapping[str, Mapping[Labels, float]]


class MetricText:
    def __init__(self, parts: Iterable[MetricSnapshot], gauges: Gauges) -> None:
        self._values: dict[str, dict[Labels, float]] = {name: {**series} for name, series in gauges.items()}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        for part in parts:
            self._add(part)

    def __str__(self) -> str:
        return "".join(
            family_text(PREFIX + family.name, family.kind, family.help, self._series(family)) for family in FAMILIES
        )

    def _add(self, part: MetricSnapshot) -> None:
        for name, samples in part.counts.items():
            values = self._values.setdefault(name, {})
            for labels, value in samples:
                values[labels] = values.get(labels, 0) + value
        for name, series in part.histograms.items():
            for labels, counts, total in series:
                self._histogram(BY_NAME[name], labels).add(counts, total)

    def _histogram(self, family: Family, labels: Labels) -> Histogram:
        series = self._histograms.setdefault(family.name, {})
        histogram = series.get(labels)
        if histogram is None:
            histogram = series[labels] = Histogram(family.bounds)
        return histogram

    def _series(self, family: Family) -> Iterable[str]:
        name = PREFIX + family.name
        if family.kind == "histogram":
            series = self._histograms.get(family.name, {}).items()
            return (histogram.text(name, family.labels, values) for values, histogram in series)
        samples = self._values.get(family.name, {}).items()
        return (f"{line_start(name, family.labels, values)}{value}\n" for values, value in samples)
