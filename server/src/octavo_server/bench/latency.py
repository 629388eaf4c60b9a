"""`octavo bench latency`: measures the time that the engine takes for one batch of requests, without a server."""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from octavo_engine.llm import LLM
from tqdm import tqdm

from octavo_server.bench.metrics import Distribution
from octavo_server.bench.offline import full_length_params, new_llm, run_benchmark

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def bench_latency(args: argparse.Namespace) -> int:
    def benchmark() -> dict[str, Any]:
        llm = new_llm(args)
        try:
            return _measure(llm, args)
        finally:
            llm.shutdown()

    return run_benchmark(benchmark, args.output_json)


def _measure(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    dice, vocab_size = random.Random(args.seed), llm.get_tokenizer().vocab_size
    prompts = [
        {"prompt_token_ids": [dice.randrange(vocab_size) for _ in range(args.input_len)]}
        for _ in range(args.batch_size)
    ]
    params = full_length_params(args, args.output_len)

    def batch() -> float:
        started_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started_s

    _repeat(batch, args.num_iters_warmup, "Warmup iterations", args)
    latencies_s = _repeat(batch, args.num_iters, "Bench iterations", args)
    shown = Distribution(sorted(latencies_s))
    print(f"Avg latency: {shown.mean} seconds")
    print(f"Std latency: {shown.std} seconds")
    for percent in _PERCENTILES:
        print(f"{percent}% percentile latency: {shown.percentile(percent)} seconds")
    return {
        "avg_latency": shown.mean,
        "std_latency": shown.std,
        "latencies": latencies_s,
        "percentiles": {str(percent): shown.percentile(percent) for percent in _PERCENTILES},
    }


def _repeat(batch: Callable[[], float], count: int, label: str, args: argparse.Namespace) -> list[float]:
    return [batch() for _ in tqdm(range(count), desc=label, disable=args.disable_tqdm)]
