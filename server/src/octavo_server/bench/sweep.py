"""A sweep is the same measurement at several loads: its table, and the load at which the server saturates."""

import math
from collections.abc import Sequence

from octavo_server.bench.report import Run

#: A server keeps up with a rate, or reaches the highest throughput, from this share of it on.
_FULL_SHARE = 0.95


def varies_concurrency(runs: Sequence[Run]) -> bool:
    return len({run.max_concurrency for run in runs}) > 1


def load_of(run: Run, *, by_concurrency: bool) -> float:
    return float(run.max_concurrency or 0) if by_concurrency else run.request_rate


def saturation(runs: Sequence[Run]) -> float | None:
    """The highest rate that the server kept up with, or the concurrency beyond which throughput no longer grows.

    None if the sweep can't show it: it has fewer than three loads, no load saturates the server, or every load does.
    """
    ordered = sorted(runs, key=lambda run: load_of(run, by_concurrency=varies_concurrency(runs)))
    if len(ordered) < 3:
        return None
    if varies_concurrency(runs):
        best = max(run.figures.output_throughput for run in ordered)
        first = next(i for i, run in enumerate(ordered) if run.figures.output_throughput >= _FULL_SHARE * best)
        return None if first == len(ordered) - 1 else load_of(ordered[first], by_concurrency=True)
    unloaded_s = ordered[0].figures.latencies["e2el"].percentile(50) / 1000
    kept_up = [run.request_rate for run in ordered if keeps_up(run, unloaded_s)]
    return max(kept_up) if kept_up and len(kept_up) < len(ordered) else None


def keeps_up(run: Run, unloaded_s: float) -> bool:
    """True if the run took at most (time until the last request arrives + `unloaded_s`) / 0.95, and at most 5 % of the
    requests failed. `unloaded_s`: median latency at the lowest load."""
    if math.isinf(run.request_rate) or run.figures.failed > (1 - _FULL_SHARE) * len(run.records):
        return False
    arriving_s = len(run.records) / run.request_rate
    return run.figures.duration_s <= (arriving_s + unloaded_s) / _FULL_SHARE


def table(runs: Sequence[Run]) -> str:
    by_concurrency = varies_concurrency(runs)
    names = ("concurrency" if by_concurrency else "rate req/s", "done", "req/s", "out tok/s")
    percentiles = ("TTFT p50", "p99 ms", "ITL p50", "p99 ms", "cache hits")
    rows: list[tuple[str, ...]] = [(*names, *percentiles)]
    for run in runs:
        f, cache = run.figures, run.prefix_cache
        rows.append(
            (
                f"{load_of(run, by_concurrency=by_concurrency):g}",
                f"{f.completed}/{len(run.records)}",
                f"{f.request_throughput:.2f}",
                f"{f.output_throughput:.1f}",
                *(f"{f.latencies[name].percentile(p):.1f}" for name in ("ttft", "itl") for p in (50, 99)),
                "?" if cache is None else f"{cache.hit_rate:.1%}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
