"""Plots latencies and throughput against load, in three panels over one axis of load.

Each panel has the median as a line and a band up to P99, a log axis if values span decades, and a grey region where the
server is saturated. The colours are those of Okabe and Ito, which colour-blind readers can distinguish, and each line
also has its own style.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from octavo_server.bench.hardware import hardware
from octavo_server.bench.metrics import LATENCIES
from octavo_server.bench.report import BenchSubject, Run
from octavo_server.bench.sweep import load_of, saturation, varies_concurrency

_BLUE, _VERMILION, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
_STYLE: Any = {  # matplotlib lists every key in its type
    "svg.fonttype": "none",  # keeps text as text
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}
_LOG_FROM = 20  # an axis is logarithmic if the ratio of its largest to its smallest value is at least this
_SIZE_INCHES = (8.5, 10.5)
_DPI = 130
_FEW_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class _Point:
    x: float
    label: str
    run: Run


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Runs by load. `unlimited`: the run with the rate "inf", which is drawn to the right of all other points."""

    points: list[_Point]
    unlimited: _Point | None
    by_concurrency: bool
    knee: float | None

    @property
    def all(self) -> list[_Point]:
        return [*self.points, *([self.unlimited] if self.unlimited else [])]


def save_plot(path: Path, measured: BenchSubject, runs: Sequence[Run]) -> list[Path]:
    """Write the plot as PNG or SVG by the suffix of `path`, or as both without a suffix; return the files."""
    paths = [path] if path.suffix else [path.with_suffix(".png"), path.with_suffix(".svg")]
    with matplotlib.rc_context(_STYLE):
        figure = draw(measured, runs)
        for file in paths:
            figure.savefig(file, dpi=_DPI)
    return paths


def draw(measured: BenchSubject, runs: Sequence[Run]) -> Figure:
    sweep = _sweep(runs)
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.07, 1, 0.93), h_pad=0.12)  # type: ignore[union-attr, call-arg]
    against = "concurrency" if sweep.by_concurrency else "request rate"
    title = f"{measured.model}: latency and throughput against {against}"
    figure.suptitle(title, fontsize=14, fontweight="bold")
    panels = figure.subplots(3, 1, sharex=True)
    _draw_latency(panels[0], sweep, "ttft", _BLUE)
    panels[0].set_title("Time to first token: delay until an answer starts (lower is better)", loc="left")
    _draw_latency(panels[1], sweep, "itl", _VERMILION)
    panels[1].set_title("Inter-token latency: pause between two chunks of text (lower is better)", loc="left")
    _draw_throughput(panels[2], sweep)
    panels[2].set_title("Throughput: output tokens of all requests together (higher is better)", loc="left")
    for panel in panels:
        _shade_saturation(panel, sweep)
    _name_saturation(panels[0], sweep)
    _label_loads(panels[2], sweep)
    figure.align_ylabels(panels)
    figure.text(0.012, 0.008, _footer(measured, runs), fontsize=7.5, color=_GREY, va="bottom", linespacing=1.5)
    return figure


def _sweep(runs: Sequence[Run]) -> _Sweep:
    by_concurrency = varies_concurrency(runs)
    loads = sorted(((load_of(run, by_concurrency=by_concurrency), run) for run in runs), key=lambda pair: pair[0])
    points = [_Point(load, f"{load:g}", run) for load, run in loads if math.isfinite(load) and load > 0]
    beyond = [run for load, run in loads if not (math.isfinite(load) and load > 0)]
    place = points[-1].x * _step(points) if points else 1.0
    label = "no limit" if by_concurrency else "all at\nonce"
    unlimited = _Point(place, label, beyond[0]) if beyond else None
    return _Sweep(points, unlimited, by_concurrency, saturation(runs))


def _step(points: Sequence[_Point]) -> float:
    return max(1.5, points[-1].x / points[-2].x) if len(points) > 1 else 2.0


def _draw_latency(panel: Axes, sweep: _Sweep, name: str, colour: str) -> None:
    def values(points: Sequence[_Point], percent: float) -> list[float]:
        return [point.run.figures.latencies[name].percentile(percent) for point in points]

    xs = [point.x for point in sweep.points]
    median, p99 = values(sweep.points, 50), values(sweep.points, 99)
    panel.fill_between(xs, median, p99, color=colour, alpha=0.18, linewidth=0)
    panel.plot(xs, p99, "--^", color=colour, markersize=5, linewidth=1.2, label="P99 (1 of 100 is slower)")
    panel.plot(xs, median, "-o", color=colour, markersize=5, linewidth=2, label="median (half are slower)")
    if sweep.unlimited is not None:
        (low,), (high,) = values([sweep.unlimited], 50), values([sweep.unlimited], 99)
        panel.plot([sweep.unlimited.x] * 2, [low, high], "-", color=colour, alpha=0.4, linewidth=5)
        panel.plot(sweep.unlimited.x, high, "^", color=colour, markersize=5)
        panel.plot(sweep.unlimited.x, low, "o", color=colour, markersize=5)
    is_log = _scale(panel, [*values(sweep.all, 50), *values(sweep.all, 99)])
    panel.set_ylabel(f"{LATENCIES[name][0]} (ms{', log scale' if is_log else ''})")
    panel.legend(loc="upper left", frameon=False)


def _draw_throughput(panel: Axes, sweep: _Sweep) -> None:
    xs = [point.x for point in sweep.points]
    served = [point.run.figures.output_throughput for point in sweep.points]
    tokens_per_request = _mean_output_tokens([point.run for point in sweep.all])
    if not sweep.by_concurrency and xs:
        offered = [x * tokens_per_request for x in xs]
        panel.plot(xs, offered, ":", color=_GREY, linewidth=1.8, label="requested (rate x tokens of an answer)")
    panel.plot(xs, served, "-o", color=_GREEN, markersize=5, linewidth=2, label="delivered")
    if sweep.unlimited is not None:
        panel.plot(sweep.unlimited.x, sweep.unlimited.run.figures.output_throughput, "o", color=_GREEN, markersize=5)
    best = max(point.run.figures.output_throughput for point in sweep.all)
    panel.set_ylim(0, 1.25 * best or 1)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    panel.axhline(best, color=_GREEN, linewidth=0.8, alpha=0.6)
    panel.annotate(
        f"most: {best:,.0f} tokens/s", (0.995, best), xycoords=("axes fraction", "data"), xytext=(0, 4),
        textcoords="offset points", ha="right", color=_GREEN,
    )  # fmt: skip
    panel.set_ylabel("output tokens/s")
    if tokens_per_request:
        _add_request_axis(panel, tokens_per_request)
    panel.legend(loc="lower right", framealpha=0.8, edgecolor="none")
    panel.set_xlabel("concurrent requests" if sweep.by_concurrency else "request rate (requests/s)")


def _add_request_axis(panel: Axes, tokens_per_request: float) -> None:
    def requests(tokens: Any) -> Any:
        return tokens / tokens_per_request

    def tokens(requests: Any) -> Any:
        return requests * tokens_per_request

    panel.secondary_yaxis("right", functions=(requests, tokens)).set_ylabel("requests/s")


def _mean_output_tokens(runs: Sequence[Run]) -> float:
    completed = sum(run.figures.completed for run in runs)
    return sum(run.figures.output_tokens for run in runs) / completed if completed else 0.0


def _scale(panel: Axes, values: Sequence[float]) -> bool:
    """Set the scale of the axis and leave space for the legend; return whether the scale is logarithmic."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > _LOG_FROM * min(positive):
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.set_ylim(min(positive) / 2, max(positive) * 6)
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        return True
    panel.set_ylim(0, max(positive, default=1.0) * 1.45)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    return False


def _shade_saturation(panel: Axes, sweep: _Sweep) -> None:
    """Shade the loads beyond the last one that the server kept up with."""
    if sweep.knee is not None:
        panel.axvline(sweep.knee, color=_GREY, linewidth=1, linestyle="-.")
        panel.axvspan(sweep.knee, sweep.all[-1].x * 4, color="#888888", alpha=0.10, linewidth=0)


def _name_saturation(panel: Axes, sweep: _Sweep) -> None:
    if sweep.knee is not None:
        unit = " at a time: no gain" if sweep.by_concurrency else " req/s: saturated"
        panel.text(
            0.99, 0.96, f"beyond {sweep.knee:g}{unit}", transform=panel.transAxes, ha="right", va="top", color=_GREY
        )  # fmt: skip


def _label_loads(panel: Axes, sweep: _Sweep) -> None:
    xs = [point.x for point in sweep.all]
    if len(xs) > 1:
        panel.set_xscale("log")
        margin = (xs[-1] / xs[0]) ** 0.05
        panel.set_xlim(xs[0] / margin, xs[-1] * margin)
    panel.set_xticks(xs, [point.label for point in sweep.all])
    panel.xaxis.set_minor_locator(NullLocator())


def _footer(measured: BenchSubject, runs: Sequence[Run]) -> str:
    done = [record for run in runs for record in run.records if record.error is None]
    prompt = sum(record.prompt_tokens for record in done) / max(len(done), 1)
    hits = [run.prefix_cache.hit_rate for run in runs if run.prefix_cache is not None]
    cached = f"prefix cache hits {max(hits):.1%} at most" if hits else "prefix cache hits unknown"
    failed = sum(run.figures.failed for run in runs)
    few = "; P99 of fewer than 100 is nearly the slowest" if len(runs[0].records) < _FEW_REQUESTS else ""
    version = f", version {measured.server_version}" if measured.server_version else ""
    return "\n".join(
        (
            f"{measured.model} at {measured.server}{version}; {hardware(measured.server)}",
            f"dataset {measured.dataset}: {len(runs[0].records)} requests at each load, of {prompt:.0f} prompt and "
            f"{_mean_output_tokens(runs):.0f} output tokens on average; {failed} failed{few}",
            f"{cached}; client CPU {max(run.client_cpu for run in runs):.0%} of a core at most; "
            f"octavo bench serve, {time.strftime('%Y-%m-%d %H:%M')}",
        )
    )
