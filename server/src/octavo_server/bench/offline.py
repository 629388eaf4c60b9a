"""Code that `octavo bench throughput` and `latency` share: the engine in this process, output and exit codes."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from octavo_engine.config import EngineConfig
from octavo_engine.llm import LLM
from octavo_engine.wire.errors import InvalidRequest, StartupError
from octavo_engine.wire.sampling import SamplingParams

from octavo_server.bench.samples import InvalidDataset

_INTERRUPTED = 130


def model_of(args: argparse.Namespace) -> str:
    return str(args.model_tag or args.model or EngineConfig().model)


def new_llm(args: argparse.Namespace) -> LLM:
    """Start the engine in this process, with the configuration of the flags. Raises StartupError."""
    settings = {f.name: getattr(args, f.name) for f in fields(EngineConfig) if f.name != "model"}
    return LLM(model_of(args), **settings)


def full_length_params(args: argparse.Namespace, output_len: int) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=output_len,
        detokenize=not args.disable_detokenize,
    )


def run_benchmark(benchmark: Callable[[], Mapping[str, Any]], output_json: str | None) -> int:
    """Run a benchmark and write its results to `output_json`; return the exit code."""
    try:
        result = benchmark()
        if output_json is not None:
            Path(output_json).write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    except (StartupError, InvalidDataset, InvalidRequest, OSError) as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0
