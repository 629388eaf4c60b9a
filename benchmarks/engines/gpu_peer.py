"""vLLM or SGLang with dummy weights, in its own environment: gpu_peer.py NAME MODEL PLANS. Prints (title, tokens/s).

PLANS: a JSON list of (title, list of (prompt tokens, output tokens), parameters of sampling), which the step `speed` of
`benchmarks/gpu/run` also runs.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], list[dict[str, Any]]], object]


def load_vllm(model: str) -> Generate:
    from vllm import LLM, SamplingParams

    settings = {"dtype": "bfloat16", "max_num_seqs": 256, "enable_prefix_caching": False, "disable_log_stats": True}
    llm = LLM(model=model, load_format="dummy", skip_tokenizer_init=True, **settings)

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> object:
        chosen = [SamplingParams(**each, detokenize=False) for each in params]
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], chosen, use_tqdm=False)

    return generate


def load_sglang(model: str) -> Generate:
    from sglang import Engine

    settings = {"dtype": "bfloat16", "max_running_requests": 256, "disable_radix_cache": True}
    engine = Engine(model_path=model, load_format="dummy", skip_tokenizer_init=True, **settings)

    def generate(prompts: list[list[int]], params: list[dict[str, Any]]) -> object:
        renamed = [{"max_new_tokens" if key == "max_tokens" else key: each[key] for key in each} for each in params]
        return engine.generate(input_ids=prompts, sampling_params=renamed)

    return generate


def main() -> None:
    name, model, plans = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    vocab, draw = json.loads(Path(model, "config.json").read_text())["vocab_size"], random.Random(0)
    generate = {"vllm": load_vllm, "sglang": load_sglang}[name](model)
    for title, sizes, sampling in plans:
        prompts = [[draw.randrange(vocab) for _ in range(num_in)] for num_in, _ in sizes]
        params = [{"temperature": 0.0, **sampling, "max_tokens": n, "ignore_eos": True} for _, n in sizes]
        began = time.perf_counter()
        generate(prompts, params)
        print(json.dumps([title, sum(num_out for _, num_out in sizes) / (time.perf_counter() - began)]), flush=True)


if __name__ == "__main__":
    main()
