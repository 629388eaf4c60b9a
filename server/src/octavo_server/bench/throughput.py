"""`octavo bench throughput`: measures the throughput of the engine for many prompts, without a server."""

import argparse
import sys
import time
from typing import Any

from octavo_engine.llm import LLM

from octavo_server.bench.datasets import check_dataset, load_text_tools, make_samples
from octavo_server.bench.offline import full_length_params, model_of, new_llm, run_benchmark
from octavo_server.bench.samples import Sample
from octavo_server.bench.server_state import FLATTERING_HIT_RATE, PrefixCache


def bench_throughput(args: argparse.Namespace) -> int:
    def benchmark() -> dict[str, Any]:
        check_dataset(args)
        text = load_text_tools(args.tokenizer or model_of(args))
        samples = make_samples(args, text, args.num_prompts, args.seed, uses_chat=False)
        llm = new_llm(args)
        try:
            return _measure(llm, args, samples)
        finally:
            llm.shutdown()

    return run_benchmark(benchmark, args.output_json)


def _measure(llm: LLM, args: argparse.Namespace, samples: list[Sample]) -> dict[str, Any]:
    prompts = [{"prompt_token_ids": sample.token_ids} for sample in samples]
    params = [full_length_params(args, sample.output_len) for sample in samples]
    before = _prefix_cache(llm)
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=not args.disable_tqdm)
    elapsed_s = time.perf_counter() - started_s
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    total = num_input + num_output
    print(
        f"Throughput: {len(samples) / elapsed_s:.2f} requests/s, {total / elapsed_s:.2f} total tokens/s, "
        f"{num_output / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_input}")
    print(f"Total num output tokens:  {num_output}")
    hit_rate = _report_hit_rate(_prefix_cache(llm).since(before), args)
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(samples),
        "total_num_tokens": total,
        "requests_per_second": len(samples) / elapsed_s,
        "tokens_per_second": total / elapsed_s,
        "output_tokens_per_second": num_output / elapsed_s,
        "prefix_cache_hit_rate": hit_rate,
    }


def _prefix_cache(llm: LLM) -> PrefixCache:
    return PrefixCache(llm.stats.prefix_cache_queries, llm.stats.prefix_cache_hits)


def _report_hit_rate(cache: PrefixCache, args: argparse.Namespace) -> float:
    print(f"Prefix cache hit rate:    {cache.hit_rate:.2%}")
    is_wanted = args.dataset_name == "prefix_repetition" or args.random_prefix_len > 0
    if cache.hit_rate > FLATTERING_HIT_RATE and not is_wanted:
        warning = f"the prefix cache served {cache.hit_rate:.0%} of the prompt tokens, so throughput looks too good:"
        print(f"WARNING: {warning} pass --no-enable-prefix-caching.", file=sys.stderr)
    return cache.hit_rate
