"""Decode with experts beside a dense model of the same active weights, and beside another implementation of them.

All engine cores run in this process and take turns, with random weights. A figure is the time of the steps in which
every stream decodes; the steps that compute prompts do not count.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from gpu.dummy_models import SHAPES, open_engine, start_decoding, step
from octavo_engine.loop.engine_core import EngineCore
from table import Samples, number, print_table, save_json

PROMPT_TOKENS = 8
EXPERTS, DENSE = "8-layers-32-experts", "8-layers-dense"


def decode(core: EngineCore, streams: int, num_tokens: int) -> float:
    """Return the tokens per second of `streams` requests once all have their first token."""
    start_decoding(core, [(PROMPT_TOKENS, num_tokens)] * streams, SHAPES[EXPERTS]["vocab_size"])
    began, outputs = time.perf_counter(), defaultdict[str, list[int]](list)
    while core.has_work():
        step(core, outputs)
    return sum(map(len, outputs.values())) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the decode throughput of a model with experts.")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16], help="concurrent requests. Default: 1 16")
    parser.add_argument("--tokens", type=int, default=48, help="output tokens of each request. Default: 48")
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each model. Default: 5")
    parser.add_argument("--layers", type=int, default=8, help="layers of each model. Default: 8")
    parser.add_argument("--dtype", default="bfloat16", help="type of the weights. Default: bfloat16")
    parser.add_argument("--num-threads", type=int, help="compute threads. Default: one per physical core")
    parser.add_argument("--model-impl", help="implementation that also runs the experts. Default: none")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    settings = {
        "dtype": arguments.dtype,
        "num_threads": arguments.num_threads,
        "max_model_len": 256,
        "hf_overrides": {"num_hidden_layers": arguments.layers},
        "num_gpu_blocks_override": 16 * max(arguments.streams),
    }
    with tempfile.TemporaryDirectory() as folder:
        cores = {name: open_engine(name, Path(folder), **settings)[0] for name in (EXPERTS, DENSE)}
        if arguments.model_impl is not None:
            other = open_engine(EXPERTS, Path(folder), **settings, model_impl=arguments.model_impl)
            cores[arguments.model_impl] = other[0]
    results: dict[str, dict[str, Samples]] = {}
    for streams in arguments.streams:
        values: dict[str, list[float]] = {name: [] for name in cores}
        for repetition in range(arguments.repetitions + 1):
            for name, core in cores.items():
                rate = decode(core, streams, arguments.tokens)
                if repetition:  # the first turn warms caches
                    values[name].append(rate)
        results[str(streams)] = {name: Samples(tuple(rates)) for name, rates in values.items()}
    others = [name for name in cores if name != EXPERTS]
    rows = [
        (streams, *rates.values(), *(number(rates[EXPERTS].median / rates[name].median) for name in others))
        for streams, rates in results.items()
    ]
    print_table("decode tok/s: median [min, max]", ("streams", *cores, *(f"experts / {name}" for name in others)), rows)
    save_json(arguments.json, results)


if __name__ == "__main__":
    main()
