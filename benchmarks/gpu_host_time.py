"""CPU time of the engine's own work for a decode step on a GPU, and its copies to the GPU, without a GPU.

Tensors are on `meta`, and a replay of a graph or a launch of a kernel does nothing: the figures include no call of
the driver. They are CPU time of the thread, as machines are shared.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.devices.cuda_graphs import GraphedSteps, capture_sizes, decode_buckets
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.step_inputs import RunnableModel, StepLimits
from octavo_engine.devices.transfers import Fetch
from octavo_engine.grammar.compiler import GrammarCompiler, Vocabulary
from octavo_engine.loop.engine_core import EngineCore, freeze_gc
from octavo_engine.ops import triton_devices
from octavo_engine.ops.triton import sampling
from octavo_engine.process import messages
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.runner.executor import CollectedResult
from octavo_engine.runner.runner import Runner
from octavo_engine.sampling.grammar_masks import GrammarMasks
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import StepPlan
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from table import Samples, print_table, save_json
from torch import Tensor

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}
#: Parts of a step; "step" has the others but "encode" within it, and "start" the two that follow it.
PARTS = ("step", "schedule", "start", "inputs", "head and sampling", "collect", "commit", "encode")
BLOCK = 16


class Meter:
    """Milliseconds of CPU time by part and step, and the number of copies."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.copies = 0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **fields: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **fields)
            finally:
                parts = self.steps[-1]
                parts[name] = parts.get(name, 0.0) + 1e3 * (time.thread_time() - began)

        return measured

    def copy(self, values: Tensor) -> Tensor:
        self.copies += 1
        return values.to("meta")


class NoLaunch:
    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


class Model:
    """A model of no computations."""

    waits_for_device, tower = False, None

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def forward(self, inputs: Tensor, positions: Tensor, ctx: object) -> Tensor:
        return torch.empty(len(inputs), 1024, dtype=torch.bfloat16, device="meta")

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.empty(len(hidden), self._vocab, device="meta")


class Backend:
    def begin_step(self, batch: object) -> None:
        pass


class MetaGpu(CpuDevice):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.name, self.torch_device, self._meter = "cuda", torch.device("meta"), meter

    def fetch(self) -> Fetch:
        def start(values: Tensor) -> Callable[[], Tensor]:
            host = torch.full(values.shape, 7, dtype=torch.int64)
            return lambda: host

        return start

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> Any:
        def capture(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            return (lambda: None), work()

        def overwrite(target: Tensor, values: Tensor) -> None:
            target.copy_(self._meter.copy(values))

        buckets = decode_buckets(capture_sizes(limits.max_num_seqs))
        return GraphedSteps(
            *(model.forward, limits, buckets, capture, self.torch_device),
            overwrite=overwrite,
            free_bytes=lambda: 0,
        )


class DecodeExecutor:
    """Runs plans in this thread."""

    images = None

    def __init__(self, runner: Runner, meter: Meter) -> None:
        self._runner, self._meter = runner, meter

    def submit(self, plan: StepPlan) -> CollectedResult:
        return CollectedResult(self._meter.timed("collect", self._runner.start(plan)))

    def on_lost(self, call: object) -> None:
        pass

    def shutdown(self, reason: str | None = None) -> None:
        pass


def no_vocabulary() -> Vocabulary:
    raise AssertionError("nothing here has a grammar")


def make_core(rows: int, vocab: int, longest: int, meter: Meter) -> EngineCore:
    batch = PersistentBatch(
        max_num_seqs=rows,
        max_model_len=longest,
        block_size=BLOCK,
        vocab_size=vocab,
        device=torch.device("meta"),
        copy=meter.copy,
        starts_ahead=True,
    )
    masks = GrammarMasks(GrammarCompiler(no_vocabulary), vocab_size=vocab)
    runner: Any = Runner(Model(vocab), Backend(), batch, masks, MetaGpu(meter))  # type: ignore[arg-type]
    runner.capture_graphs()
    runner._start = meter.timed("start", runner._start)
    runner._batch.inputs = meter.timed("inputs", batch.inputs)
    runner._sample = meter.timed("head and sampling", runner._sample)
    config = SchedulerConfig(
        max_model_len=longest,
        num_blocks=rows * (longest // BLOCK + 1),
        block_size=BLOCK,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        steps_ahead=1,
    )
    scheduler: Any = Scheduler(config)
    scheduler.step = meter.timed("schedule", scheduler.step)
    scheduler.commit = meter.timed("commit", scheduler.commit)
    return EngineCore(scheduler, DecodeExecutor(runner, meter))  # type: ignore[arg-type]


def measure(rows: int, vocab: int, params: dict[str, Any], *, context: int, steps: int) -> Meter:
    """Run decode steps of sequences of half to all of `context` tokens."""
    meter, chance = Meter(), random.Random(0)
    longest = context + 2 * steps
    core = make_core(rows, vocab, longest, meter)
    for i in range(rows):
        length = chance.randint(context // 2, context)
        request = EngineRequest(
            request_id=str(i),
            prompt_token_ids=[chance.randrange(vocab) for _ in range(length)],
            params=SamplingParams(max_tokens=longest - length - 1, ignore_eos=True, **params),
            eos_token_id=2,
        )
        core.add(request)
    step, encode = meter.timed("step", core.step), meter.timed("encode", messages.encode)
    while not meter.steps or not all(seq.computed > seq.num_prompt + 4 for seq in core._scheduler.sequences()):
        meter.steps.append({})
        step()
    freeze_gc()
    meter.steps.clear()
    meter.copies = 0
    for _ in range(steps):
        meter.steps.append({})
        encode(messages.Outputs(step()))
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the milliseconds of CPU time of a GPU's decode step.")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 64, 1], help="sequences. Default: 256 64 1")
    parser.add_argument("--vocab", type=int, default=151936, help="tokens of the vocabulary. Default: 151936")
    parser.add_argument("--context", type=int, default=1024, help="the most tokens of a prompt. Default: 1024")
    parser.add_argument("--steps", type=int, default=100, help="number of steps. Default: 100")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    triton_devices.DEVICES.add("meta")
    for name in [name for name in vars(sampling) if name.endswith("_kernel")]:
        setattr(sampling, name, NoLaunch())
    results: dict[str, dict[str, Samples]] = {}
    cells = []
    for rows in arguments.rows:
        for kind, params in KINDS.items():
            meter = measure(rows, arguments.vocab, params, context=arguments.context, steps=arguments.steps)
            found = {part: Samples(tuple(step[part] for step in meter.steps)) for part in PARTS}
            results[f"{rows} rows, {kind}"] = found
            cells.append((f"{kind}", rows, *found.values(), f"{meter.copies / arguments.steps:.1f}"))
    header = ("requests", "rows", *(f"{part}, ms" for part in PARTS), "copies")
    print_table(f"CPU time of a decode step, vocabulary {arguments.vocab}", header, cells)
    save_json(arguments.json, results)


if __name__ == "__main__":
    main()
