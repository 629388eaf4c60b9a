"""`octavo bench serve`: measures a running server in one run, or in a sweep over several loads; writes a report.

The exit code is 1 if nothing could be measured: no server, an invalid option, or no successful request.
"""

import argparse
import asyncio
import gc
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import uvloop
from octavo_engine.wire.errors import StartupError
from tqdm import tqdm

from octavo_server.bench.datasets import TextTools, check_dataset, load_text_tools, make_samples
from octavo_server.bench.load import BenchTarget, OnProgress, run_load
from octavo_server.bench.metrics import figures
from octavo_server.bench.options import BenchOptions, LoadLevel, parse_options
from octavo_server.bench.report import (
    BenchSubject,
    Run,
    block,
    read_prefix_cache,
    read_version,
    reset_prefix_cache,
    result,
    table,
    warnings,
)
from octavo_server.bench.samples import InvalidDataset, Sample
from octavo_server.client.api import ApiClient, ApiFailure, ListedModel, Unreachable

_READY_POLL_S = 1.0


def bench_serve(args: argparse.Namespace) -> int:
    try:
        options = parse_options(args)
        check_dataset(args)
        folder = _make_folder(args)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runs, measured = runner.run(_measure(options, args))
        for path in save_results(folder, options, args, measured, runs):
            print(f"results: {path}")
    except (ApiFailure, InvalidDataset, StartupError, OSError) as error:
        hint = f" Start a server with `octavo serve --port {args.port}`." if isinstance(error, Unreachable) else ""
        print(f"octavo: {error}{hint}", file=sys.stderr)
        return 1
    return 0 if any(run.figures.completed for run in runs) else 1


async def _measure(options: BenchOptions, args: argparse.Namespace) -> tuple[list[Run], BenchSubject]:
    async with ApiClient(
        options.base_url, key=options.key, headers=options.headers, verify_tls=not args.insecure
    ) as api:
        card = await _find_model(api, options, args.ready_check_timeout_sec)
        measured = BenchSubject(
            model=card.id,
            tokenizer=args.tokenizer or card.root or card.id,
            server_version=await read_version(api),
        )
        target = replace(options.target, model=args.served_model_name or card.id)
        bench = _Bench(api, options, args, load_text_tools(measured.tokenizer), target)
        runs = [await bench.run(load, args.seed + index) for index, load in enumerate(options.loads)]
    if len(runs) > 1:
        print(table(runs))
    return runs, measured


async def _find_model(api: ApiClient, options: BenchOptions, timeout_s: float) -> ListedModel:
    """Return the server's entry of the requested model, or of its first model; for a requested name that the server
    does not list, an entry with only that name."""
    deadline_s = time.monotonic() + timeout_s
    name = options.target.model
    while True:
        try:
            cards = await api.models(options.models_path)
            break
        except Unreachable:
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(_READY_POLL_S)
    if not name and not cards:
        raise ApiFailure("the server lists no model yet: its engines may still be starting.")
    return next((card for card in cards if card.id == name), ListedModel(name) if name else cards[0])


@dataclass(frozen=True, slots=True)
class _Bench:
    """Runs the loads. Each run has its own prompts, so that the prefix cache has none of them from another run."""

    api: ApiClient
    options: BenchOptions
    args: argparse.Namespace
    text: TextTools
    target: BenchTarget

    async def run(self, load: LoadLevel, seed: int) -> Run:
        args, target = self.args, self.target
        samples = make_samples(args, self.text, args.num_prompts + args.num_warmups, seed, uses_chat=target.uses_chat)
        samples, warmups = samples[: args.num_prompts], samples[args.num_prompts :]
        print(_announcement(load, len(samples)))
        await self._warm_up(warmups, load)
        was_reset = args.reset_prefix_cache and await self._reset()
        before = await read_prefix_cache(self.api)
        _freeze_gc()
        with _progress(len(samples), enabled=not args.disable_tqdm) as on_progress:
            offsets_s = load.arrivals.offsets_s(len(samples), seed)
            measured = await run_load(
                self.api, target, samples, offsets_s, max_concurrency=load.max_concurrency, on_progress=on_progress
            )
        after = await read_prefix_cache(self.api)
        run = Run(
            request_rate=load.arrivals.rate,
            max_concurrency=load.max_concurrency,
            figures=figures(measured.records, measured.duration_s, self.options.goodput_ms),
            records=measured.records,
            prefix_cache=None if before is None or after is None else after.since(before),
            client_cpu_s=measured.cpu_s,
        )
        self._print_report(run, was_reset=was_reset)
        return run

    async def _warm_up(self, samples: Sequence[Sample], load: LoadLevel) -> None:
        if samples:
            print(f"Warming up with {len(samples)} requests...")
            limit, offsets_s = load.max_concurrency, [0.0] * len(samples)
            await run_load(
                self.api, self.target, samples, offsets_s, max_concurrency=limit, on_progress=lambda done, tokens: None
            )

    async def _reset(self) -> bool:
        done = await reset_prefix_cache(self.api)
        if not done:
            print("octavo: the server did not empty its prefix cache (POST /reset_prefix_cache).", file=sys.stderr)
        return done

    def _print_report(self, run: Run, *, was_reset: bool) -> None:
        print(block(run, self.options.latencies, self.options.percentiles), flush=True)
        repeats = self.args.dataset_name == "prefix_repetition" or self.args.random_prefix_len > 0
        for warning in warnings(run, allows_hits=repeats, was_reset=was_reset):
            print(f"WARNING: {warning}", file=sys.stderr)


def _announcement(load: LoadLevel, num_prompts: int) -> str:
    arrivals = load.arrivals
    if arrivals.ramp_up is not None:
        rate = f"rate {arrivals.ramp_up.start_rps:g} to {arrivals.ramp_up.end_rps:g} req/s"
    else:
        rate = "all at once" if math.isinf(arrivals.rate) else f"rate {arrivals.rate:g} req/s"
    limit = f"at most {load.max_concurrency} at a time" if load.max_concurrency else "no limit on concurrency"
    return f"{num_prompts} requests, {rate}, burstiness {arrivals.burstiness:g}, {limit}"


def _freeze_gc() -> None:
    """Exempt the existing objects, such as the samples, from garbage collection, which would pause the measurement."""
    gc.collect()
    gc.freeze()


@contextmanager
def _progress(total: int, *, enabled: bool) -> Iterator[OnProgress]:
    started_s, num_tokens = time.perf_counter(), 0
    with tqdm(total=total, unit="req", dynamic_ncols=True, disable=not enabled) as bar:

        def on_progress(num_done: int, tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            if num_done:
                rate = num_tokens / max(time.perf_counter() - started_s, 1e-9)
                bar.set_postfix_str(f"{rate:.0f} chunks/s", refresh=False)
                bar.update(num_done)

        yield on_progress


def _make_folder(args: argparse.Namespace) -> Path | None:
    """Make the folder of the results before anything is measured; return None if none are saved. Raises OSError."""
    if not (args.save_result or args.append_result):
        return None
    folder = Path(args.result_dir or ".")
    holder = (folder / (args.result_filename or "result")).parent  # the name may have folders of its own
    holder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=holder):  # it can be written to
        return folder


def save_results(
    folder: Path | None,
    options: BenchOptions,
    args: argparse.Namespace,
    measured: BenchSubject,
    runs: Sequence[Run],
) -> list[Path]:
    """Write the results to the folder; return the files. Raises OSError.

    The files have vLLM's keys and names. A sweep writes a file per load, or a line per load to one file.
    """
    if folder is None:
        return []
    date = time.strftime("%Y%m%d-%H%M%S")
    appends = args.append_result or (args.result_filename is not None and len(runs) > 1)
    written: dict[Path, None] = {}
    for run in runs:
        path = folder / (args.result_filename or _file_name(args, measured, run, date))
        content = json.dumps(_content(options, args, measured, run, date))
        if appends:
            with path.open("a", encoding="utf-8") as file:
                file.write(content + "\n")
        else:
            path.write_text(content, encoding="utf-8")
        written[path] = None
    return list(written)


def _content(
    options: BenchOptions, args: argparse.Namespace, measured: BenchSubject, run: Run, date: str
) -> dict[str, Any]:
    figures = result(run, options.latencies, options.percentiles, detailed=args.save_detailed)
    return {
        "date": date,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": measured.model,
        "tokenizer_id": measured.tokenizer,
        "server_version": measured.server_version,
        "num_prompts": args.num_prompts,
        **options.metadata,
        "request_rate": _rate(run.request_rate),
        "burstiness": args.burstiness,
        "max_concurrency": run.max_concurrency,
        **figures,
    }


def _rate(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate


def _file_name(args: argparse.Namespace, measured: BenchSubject, run: Run, date: str) -> str:
    label = (args.label or args.backend).replace("/", "-")
    limit = f"-concurrency{run.max_concurrency}" if run.max_concurrency is not None else ""
    model = measured.model.rpartition("/")[2]
    if args.ramp_up_strategy is not None:
        load = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
    else:
        load = f"{_rate(run.request_rate)}qps"
    return f"{label}-{load}{limit}-{model}-{date}.json"
