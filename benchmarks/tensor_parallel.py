"""Tokens per second of one rank with all threads and of several ranks that divide them, on a CPU, and their weights.

The model has the shape of TinyLlama-1.1B and dummy weights in bf16. Both engines are loaded at once and run in turn in
each round; figures are medians over the rounds.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from gpu.dummy_models import generate, shape
from octavo_engine.loop.start import find_capacity, find_loader, start_core
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig

SHAPE = shape("Llama", 2048, 5632, 22, (32, 4, 64), 32000)
PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=22)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        configs = {
            size: EngineConfig(
                model=folder,
                load_format="dummy",
                hf_overrides={"num_hidden_layers": args.layers},
                dtype="bfloat16",
                enable_prefix_caching=False,
                max_model_len=512,
                num_gpu_blocks_override=512,
                num_threads=args.threads,
                tensor_parallel_size=size,
            )
            for size in (1, args.ranks)
        }
        whole, *_ = find_capacity(configs[1]).rank_weights_bytes
        parts = find_capacity(configs[args.ranks]).rank_weights_bytes
        print("weights of each rank, as shares of all:", *(f"{part / whole:.3f}" for part in parts), flush=True)
        cores = {size: start_core(config, find_loader(DEFAULT_LOADER))[0] for size, config in configs.items()}
        rates: dict[int, list[float]] = {size: [] for size in cores}
        for round_number in range(1 + args.rounds):  # the first one warms up
            for size, core in cores.items():
                _, seconds = generate(core, [(PROMPT_TOKENS, args.tokens)] * args.streams, SHAPE["vocab_size"])
                rate = args.streams * args.tokens / seconds
                print(f"round {round_number}: {size} ranks: {rate:7.2f} tokens/s", flush=True)
                rates[size] += [rate] if round_number else []
        for core in cores.values():
            core.shutdown()
    one, several = (statistics.median(rates[size]) for size in (1, args.ranks))
    print(f"{args.ranks} ranks: {several:.2f} tokens/s, {several / one:.3f} of the {one:.2f} of one rank")


if __name__ == "__main__":
    main()
