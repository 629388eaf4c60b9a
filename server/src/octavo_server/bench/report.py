"""Writes the figures of a run as vLLM's summary and result file, and a table of the runs of a sweep.

Figures that vLLM doesn't measure are in a section at the end of the block, where vLLM has its optional sections, so
that scripts written for vLLM still find its lines. The version of the server and the share of prompt tokens that its
prefix cache has served are read from the server.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo_server.bench.load import RequestRecord
from octavo_server.bench.metrics import LATENCIES, Figures, PrefixCache, parse_prefix_cache
from octavo_server.client.api import ApiClient, ApiFailure

_WIDTH = 50
#: CPU use of the client, as a share of one core, from which on the client, which has one thread, may limit the results.
BUSY_CLIENT_CPU = 0.8
#: Share of prompt tokens found in the prefix cache above which results measure the cache rather than the engine.
FLATTERING_HIT_RATE = 0.05


async def read_prefix_cache(api: ApiClient) -> PrefixCache | None:
    try:
        return parse_prefix_cache((await api.get(f"{api.url}/metrics")).decode(errors="replace"))
    except ApiFailure:
        return None


async def reset_prefix_cache(api: ApiClient) -> bool:
    """Empty the server's prefix cache; False if the request failed."""
    try:
        await api.post(f"{api.url}/reset_prefix_cache")
    except ApiFailure:
        return False
    return True


async def read_version(api: ApiClient) -> str | None:
    try:
        answer = msgspec.json.decode(await api.get(f"{api.url}/version"))
    except (ApiFailure, msgspec.DecodeError, RecursionError):
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSubject:
    """Model and server of the measurement, for the result file."""

    model: str
    tokenizer: str
    server_version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The measurement at one load."""

    request_rate: float
    max_concurrency: int | None
    figures: Figures
    records: list[RequestRecord]
    prefix_cache: PrefixCache | None
    client_cpu_s: float

    @property
    def client_cpu(self) -> float:
        """CPU use of the client, as a share of one core."""
        return self.client_cpu_s / self.figures.duration_s


def block(run: Run, latencies: Sequence[str], percentiles: Sequence[float]) -> str:
    lines = ["{s:{c}^{n}}".format(s=" Serving Benchmark Result ", c="=", n=_WIDTH), *_totals(run)]
    for name in LATENCIES:
        if name in latencies:
            lines += _latency(run.figures, name, percentiles)
    return "\n".join([*lines, *_conditions(run), "=" * _WIDTH])


def _totals(run: Run) -> list[str]:
    f = run.figures
    rows: list[tuple[str, float | None]] = [
        ("Successful requests:", f.completed),
        ("Failed requests:", f.failed),
        ("Maximum request concurrency:", run.max_concurrency),
        ("Request rate configured (RPS):", None if math.isinf(run.request_rate) else run.request_rate),
        ("Benchmark duration (s):", f.duration_s),
        ("Total input tokens:", f.input_tokens),
        ("Total generated tokens:", f.output_tokens),
        ("Request throughput (req/s):", f.request_throughput),
        ("Request goodput (req/s):", f.request_goodput),
        ("Output token throughput (tok/s):", f.output_throughput),
        ("Peak output token throughput (tok/s):", f.peak_output_tokens_per_s),
        ("Peak concurrent requests:", float(f.peak_concurrent_requests)),
        ("Total token throughput (tok/s):", f.total_token_throughput),
    ]
    return [_row(label, value) for label, value in rows if value is not None]


def _latency(figures: Figures, name: str, percentiles: Sequence[float]) -> list[str]:
    short, heading = LATENCIES[name]
    values = figures.latencies[name]
    return [
        _heading(heading),
        _row(f"Mean {short} (ms):", values.mean),
        _row(f"Median {short} (ms):", values.percentile(50)),
        *(_row(f"P{percentile_word(p)} {short} (ms):", values.percentile(p)) for p in percentiles),
    ]


def _conditions(run: Run) -> list[str]:
    lines = [_heading("Conditions of the Measurement")]
    if run.prefix_cache is not None:
        lines.append(_row("Prefix cache hit rate (%):", 100 * run.prefix_cache.hit_rate))
    return [*lines, _row("Client CPU (% of a core):", 100 * run.client_cpu)]


def _heading(text: str) -> str:
    return "{s:{c}^{n}}".format(s=text, c="-", n=_WIDTH)


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"


def percentile_word(percentile: float) -> str:
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def warnings(run: Run, *, allows_hits: bool, was_reset: bool) -> list[str]:
    """Reasons why the figures may mislead, with remedies. `allows_hits`: the dataset repeats prefixes on purpose."""
    texts = []
    cache = run.prefix_cache
    if cache is not None and cache.hit_rate > FLATTERING_HIT_RATE and not allows_hits:
        remedy = "use another --seed" if was_reset else "use another --seed, or pass --reset-prefix-cache"
        texts.append(
            f"{cache.hit_rate:.0%} of the prompt tokens were found in the prefix cache, as earlier runs or other "
            f"requests had the same prompts: TTFT and throughput look too good; {remedy}."
        )
    if run.client_cpu > BUSY_CLIENT_CPU:
        texts.append(
            f"this client used {run.client_cpu:.0%} of a core and has only one thread, so it may limit the "
            "figures; run several clients in parallel, each with a part of the load."
        )
    errors = [record.error for record in run.records if record.error is not None]
    if errors:
        texts.append(f"{len(errors)} of {len(run.records)} requests failed; the first: {errors[0]}")
    return texts


def table(runs: Sequence[Run]) -> str:
    """Return the table of a sweep: the same measurement at several loads."""
    by_concurrency = len({run.max_concurrency for run in runs}) > 1
    names = ("concurrency" if by_concurrency else "rate req/s", "done", "req/s", "out tok/s")
    percentiles = ("TTFT p50", "p99 ms", "ITL p50", "p99 ms", "cache hits")
    rows: list[tuple[str, ...]] = [(*names, *percentiles)]
    for run in runs:
        f, cache = run.figures, run.prefix_cache
        rows.append(
            (
                f"{run.max_concurrency or 0 if by_concurrency else run.request_rate:g}",
                f"{f.completed}/{len(run.records)}",
                f"{f.request_throughput:.2f}",
                f"{f.output_throughput:.1f}",
                *(f"{f.latencies[name].percentile(p):.1f}" for name in ("ttft", "itl") for p in (50, 99)),
                "?" if cache is None else f"{cache.hit_rate:.1%}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def result(run: Run, latencies: Sequence[str], percentiles: Sequence[float], *, detailed: bool) -> dict[str, Any]:
    """Contents of the result file: vLLM's keys, and prefix_cache_hit_rate and client_cpu."""
    f = run.figures
    fields: dict[str, Any] = {
        "duration": f.duration_s,
        "completed": f.completed,
        "failed": f.failed,
        "total_input_tokens": f.input_tokens,
        "total_output_tokens": f.output_tokens,
        "request_throughput": f.request_throughput,
        "request_goodput": f.request_goodput,
        "output_throughput": f.output_throughput,
        "total_token_throughput": f.total_token_throughput,
        "max_output_tokens_per_s": f.peak_output_tokens_per_s,
        "max_concurrent_requests": f.peak_concurrent_requests,
        "prefix_cache_hit_rate": None if run.prefix_cache is None else run.prefix_cache.hit_rate,
        "client_cpu": run.client_cpu,
    }
    for name in (name for name in LATENCIES if name in latencies):
        values = f.latencies[name]
        fields |= {f"mean_{name}_ms": values.mean, f"median_{name}_ms": values.percentile(50)}
        fields[f"std_{name}_ms"] = values.std
        fields |= {f"p{percentile_word(p)}_{name}_ms": values.percentile(p) for p in percentiles}
    return fields | (_details(run.records) if detailed else {})


def _details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.itls_s for r in records],
        "latencies": [r.latency_s for r in records],
        "start_times": [r.start_s for r in records],
        "queue_times": [r.queue_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error or "" for r in records],
    }
