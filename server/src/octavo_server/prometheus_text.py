"""Prometheus' text format for the router, whose worker processes send their histograms to the one that is scraped.

Text that doesn't change between two scrapes (names, labels, bounds) is cached. All objects belong to one event loop, so
there are no locks; observing a value costs a bisection and two additions.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Most series whose names and labels are kept as text.
MAX_SERIES = 10_000


def _line_start(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Format the start of a sample's line, such as `name{a="x",b="y"} `, with escaped values."""
    inside = ",".join(f'{label}="{_escape(value)}"' for label, value in zip(labels, values, strict=True))
    return f"{name}{{{inside}}} " if inside else f"{name} "


line_start = lru_cache(MAX_SERIES)(_line_start)


def family_head(name: str, kind: str, help: str) -> str:
    """The HELP and TYPE lines above a metric's samples. `name` of a counter must include the suffix `_total`."""
    text = help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


class Histogram:
    """The counts of one series."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> tuple[list[int], float]:
        """The count of each bucket, and the sum of the values, which another process can `add` to its own histogram."""
        return [*self._counts], self._sum

    def add(self, counts: Sequence[int], total: float) -> None:
        self._counts = [own + other for own, other in zip(self._counts, counts, strict=True)]
        self._sum += total

    def text(self, name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> str:
        starts = _histogram_starts(name, tuple(self._bounds), labels, values)
        up_to = [*accumulate(self._counts)]
        return "".join(
            f"{start}{number}\n" for start, number in zip(starts, (*up_to, up_to[-1], self._sum), strict=True)
        )


@lru_cache(MAX_SERIES)
def _histogram_starts(
    name: str, bounds: tuple[float, ...], labels: tuple[str, ...], values: tuple[str, ...]
) -> tuple[str, ...]:
    edges = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    buckets = (_line_start(f"{name}_bucket", (*labels, "le"), (*values, edge)) for edge in edges)
    return *buckets, _line_start(f"{name}_count", labels, values), _line_start(f"{name}_sum", labels, values)


def family_text(name: str, kind: str, help: str, series: Iterable[str]) -> str:
    return family_head(name, kind, help) + "".join(series)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
