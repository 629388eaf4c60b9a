"""Prometheus' text format for the router, whose worker processes send their histograms to the one that is scraped.

Text that doesn't change between two scrapes (names, labels, bounds) is built once. All objects belong to one event
loop, so there are no locks; observing a value costs a bisection and two additions.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def label_text(labels: Mapping[str, str]) -> str:
    """Format labels as `a="x",b="y"`, escaped."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def family_head(name: str, kind: str, help: str) -> str:
    """The HELP and TYPE lines above a metric's samples. `name` of a counter must include the suffix `_total`."""
    text = help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def bound_text(bound: float) -> str:
    return repr(float(bound))


class Histogram:
    """One series of a histogram. `names`: all names under which it is exposed; some metrics also have an old name."""

    __slots__ = ("_bounds", "_counts", "_starts", "_sum", "_tails")

    def __init__(self, names: Sequence[str], bounds: Sequence[float], labels: str = "") -> None:
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        edges = [*map(bound_text, self._bounds), "+Inf"]
        lead, braces = labels + "," if labels else "", f"{{{labels}}}" if labels else ""
        self._starts = {name: [f'{name}_bucket{{{lead}le="{edge}"}} ' for edge in edges] for name in names}
        self._tails = {name: (f"{name}_count{braces} ", f"{name}_sum{braces} ") for name in names}

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def snapshot(self) -> tuple[list[int], float]:
        """The count of each bucket, and the sum of the values, which another process can `add` to its own histogram."""
        return [*self._counts], self._sum

    def add(self, counts: Sequence[int], total: float) -> None:
        self._counts = [own + other for own, other in zip(self._counts, counts, strict=True)]
        self._sum += total

    def text(self, name: str) -> str:
        lines, total = [], 0
        for start, count in zip(self._starts[name], self._counts, strict=True):
            total += count
            lines.append(f"{start}{total}\n")
        count_start, sum_start = self._tails[name]
        return f"{''.join(lines)}{count_start}{total}\n{sum_start}{self._sum}\n"


def family_text(name: str, kind: str, help: str, series: Iterable[str]) -> str:
    return family_head(name, kind, help) + "".join(series)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
