"""Time of the scheduler per step with 256 decoding sequences: `step`, `commit` and `stats`.

There is no model and no executor: results are made outside the measured time. Prompts have different lengths, so that
block boundaries, where a block is allocated and one is hashed, are spread evenly over the steps. No prompt is in the
prefix cache.
"""

import argparse
import random
import time
from pathlib import Path

from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import freeze_gc
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import SeqResult, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from table import Samples, number, print_table, save_json

GOAL_MS = 1.0
BLOCK_SIZE = 16


def scheduler_with(running: int, steps: int, *, caching: bool, tenants: int = 1) -> Scheduler:
    """Return a scheduler whose sequences have computed their prompts and have `steps` decode steps left."""
    longest = 400 + steps
    config = SchedulerConfig(
        max_model_len=2 * longest,
        num_blocks=running * (2 * longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        enable_prefix_caching=caching,
    )
    scheduler, generator = Scheduler(config), random.Random(0)
    for i in range(running):
        prompt = [generator.randrange(49152) for _ in range(generator.randint(100, 400))]
        params = SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True)
        request = EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params, tenant=str(i % tenants))
        scheduler.add(request, 0.0)
    while (plan := scheduler.step(0.0)).num_tokens != running or len(plan.seqs) != running:
        scheduler.commit(result_of(plan), 0.0)
    scheduler.commit(result_of(plan), 0.0)
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    seqs = [SeqResult(seq_id=step.seq_id, token_ids=[step.start & 0xFFFF]) for step in plan.seqs if step.sample]
    return StepResult(step_id=plan.step_id, seqs=seqs)


def measure(scheduler: Scheduler, steps: int) -> dict[str, Samples]:
    """Return the milliseconds of each part of each step."""
    rows = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.step(0.0)
        planned = time.perf_counter()
        result = result_of(plan)
        answered = time.perf_counter()
        scheduler.commit(result, 0.0)
        committed = time.perf_counter()
        scheduler.stats()
        ended = time.perf_counter()
        step, commit, stats = planned - started, committed - answered, ended - committed
        rows.append((step, commit, step + commit, stats))
    columns = zip(*rows, strict=True)
    names = ("step", "commit", "step + commit", "stats")
    return {name: Samples(tuple(1e3 * s for s in column)) for name, column in zip(names, columns, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the milliseconds of scheduling per step.")
    parser.add_argument("--running", type=int, default=256, help="decoding sequences. Default: 256")
    parser.add_argument("--steps", type=int, default=1000, help="number of steps. Default: 1000")
    parser.add_argument("--tenants", type=int, default=1, help="tenants of the sequences. Default: 1")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    results, rows = {}, []
    for name, caching in (("prefix caching on", True), ("prefix caching off", False)):
        scheduler = scheduler_with(arguments.running, arguments.steps, caching=caching, tenants=arguments.tenants)
        freeze_gc()
        results[name] = measure(scheduler, arguments.steps)
        both = results[name]["step + commit"].median
        cells = [number(samples.median) for samples in results[name].values()]
        rows.append((name, *cells, f"< {GOAL_MS:g}", "met" if both < GOAL_MS else "missed"))
    header = ("median ms", "step", "commit", "both", "stats", "goal", "")
    print_table(f"Scheduling with {arguments.running} running, {arguments.steps} steps, no prefix hits", header, rows)
    save_json(arguments.json, results)


if __name__ == "__main__":
    main()
