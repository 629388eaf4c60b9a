"""Tokens per second of `LLM.embed`, beside `LLM.generate` of one token from the same texts, in turn, by one process.

The model has the shape of Qwen3-Embedding-0.6B and random weights; texts are random tokens. Both engines are loaded at
once, and ratios are of runs that follow each other.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import support_path  # noqa: F401  (makes octavo_testing importable)
from octavo_engine import LLM, SamplingParams
from octavo_testing.model_shapes import write_shapes
from octavo_testing.tiny_models import byte_tokenizer
from table import Samples, print_table, save_json


def draw_texts(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(1000, 150_000) for _ in range(num_tokens)] for _ in range(count)]


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure embeddings beside generation of one token.")
    parser.add_argument("--texts", type=int, default=64, help="texts of a run. Default: 64")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a text. Default: 128")
    parser.add_argument("--runs", type=int, default=3, help="measured runs of each kind. Default: 3")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model. Default: 28")
    parser.add_argument("--dtype", default="bfloat16", help="type of the weights. Default: bfloat16")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    common = {"load_format": "dummy", "dtype": arguments.dtype, "max_model_len": 1024, "enable_prefix_caching": False}
    common |= {"kv_cache_memory_bytes": 5 << 28, "hf_overrides": {"num_hidden_layers": arguments.layers}}
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with tempfile.TemporaryDirectory() as name:
        folder = write_shapes("Qwen3-0.6B", Path(name))
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        embedding, generating = (LLM(str(folder), runner=kind, **common) for kind in ("pooling", "generate"))
    runs = []
    for at in range(1 + arguments.runs):  # the first one, with fewer texts, warms up
        texts = draw_texts(arguments.texts if at else arguments.texts // 8, arguments.tokens, seed=at)
        pair = (
            seconds(lambda texts=texts: embedding.embed(texts, use_tqdm=False)),
            seconds(lambda texts=texts: generating.generate(texts, params, use_tqdm=False)),
        )
        if at:
            runs.append(pair)
    num_tokens = arguments.texts * arguments.tokens
    found = {
        "embed": Samples(tuple(num_tokens / embed_s for embed_s, _ in runs)),
        "generate": Samples(tuple(num_tokens / generate_s for _, generate_s in runs)),
        "ratio": Samples(tuple(generate_s / embed_s for embed_s, generate_s in runs)),
        "weights saved (MiB)": Samples(
            ((generating.ready_info.weights_bytes - embedding.ready_info.weights_bytes) / 2**20,)
        ),
    }
    title = f"{arguments.texts} texts of {arguments.tokens} tokens, {arguments.dtype}: tokens/s"
    print_table(title, ("model", *found), [("Qwen3-0.6B", *found.values())])
    save_json(arguments.json, found)
    for llm in (embedding, generating):
        llm.shutdown()


if __name__ == "__main__":
    main()
