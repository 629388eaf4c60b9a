"""Writes result files with vLLM's keys and names. A sweep writes a file per load, or a line per load to one file."""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo_server.bench.options import BenchOptions
from octavo_server.bench.report import BenchSubject, Run, result


def save_results(
    options: BenchOptions, args: argparse.Namespace, measured: BenchSubject, runs: Sequence[Run]
) -> list[Path]:
    """Write the results if --save-result or --append-result is set; return the files. Raises OSError."""
    if not (args.save_result or args.append_result):
        return []
    folder = Path(args.result_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
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
    label = args.label or args.backend
    limit = f"-concurrency{run.max_concurrency}" if run.max_concurrency is not None else ""
    model = measured.model.rpartition("/")[2]
    if args.ramp_up_strategy is not None:
        load = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
    else:
        load = f"{_rate(run.request_rate)}qps"
    return f"{label}-{load}{limit}-{model}-{date}.json"
