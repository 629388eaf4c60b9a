"""An eager and a recording runner of one model that run the same plans and must give equal logits, bit for bit."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from octavo_engine.devices.cuda_graphs import Bucket, GraphedSteps, decode_buckets
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.recorded_steps import RecordedSteps
from octavo_engine.devices.step_inputs import RunnableModel, StepGraphs, StepLimits
from octavo_engine.devices.transfers import Copy
from octavo_engine.grammar.compiler import GrammarCompiler, Vocabulary
from octavo_engine.models.registry import complete_config
from octavo_engine.ops.attention import AttentionBackend, ForwardContext, LayerKVSpec
from octavo_engine.ops.reference import ReferenceBackend
from octavo_engine.runner.engine_memory import EngineMemory
from octavo_engine.runner.graphed_model import LoadedModel
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.runner.model_loading import load_model, make_runner
from octavo_engine.runner.runner import Runner
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_files
from octavo_engine.weights.loader import stored_tensors
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan, StepResult
from octavo_engine.wire.records import ImageSpan
from octavo_engine.wire.sampling import SamplingParams
from torch import Tensor

from octavo_testing.tiny_models import make_tiny


def make_long_tiny(name: str, folder: Path, *, max_model_len: int) -> Path:
    """Write a tiny model whose sequences may have `max_model_len` tokens."""
    path = make_tiny(name, folder)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": max_model_len}))
    return path


class ShownDevice(CpuDevice):
    """A CPU that shows the graphs of the last model; None before the first."""

    graphs: RecordedSteps | None = None

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> StepGraphs:
        self.graphs = RecordedSteps(model.forward, model.constants())
        return self.graphs


def repeated(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Stand in for the capture of a CUDA graph: a replay does the work again, over the tensors that it holds."""
    output = work()

    def replay() -> None:
        output.copy_(work())

    return replay, output


#: Graphs of 1, 2, 4 and 8 sequences, and of 10, 20 and 60 tokens. There is none of 21 to 44 tokens.
BUCKETS = (*decode_buckets((1, 2, 4, 8)), Bucket(10, 10, 10), Bucket(20, 13, 20), Bucket(60, 13, 60, 45))


class GraphedDevice(ShownDevice):
    """A CPU with the graphs of a GPU, which have the sizes `buckets`, and attention that takes rows without keys."""

    graphed: GraphedSteps | None = None
    buckets: tuple[Bucket, ...] = BUCKETS

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return ReferenceBackend(specs, block_size, dtype)

    def input_copy(self) -> Copy:
        return torch.clone

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> StepGraphs:
        self.graphed = GraphedSteps(
            *(model.forward, limits, self.buckets, repeated, self.torch_device),
            overwrite=Tensor.copy_,
            free_bytes=lambda: 0,
        )
        return self.graphed


class ShownModel:
    """A model that keeps its last logits, and the positions of the last run of its Python code.

    `before`: called with the input ids before this code runs.
    """

    def __init__(self, model: RunnableModel) -> None:
        self._model = model
        self.seen: Tensor | None = None
        self.positions: Tensor | None = None
        self.waiting_operator = model.waiting_operator
        self.constants = model.constants
        self.forwards = 0
        self.before: Callable[[Tensor], object] | None = None

    def forward(self, inputs: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        self.forwards += 1
        self.positions = positions
        if self.before is not None:
            self.before(inputs)
        return self._model.forward(inputs, positions, ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._model.logits(hidden)
        self.seen = logits.clone()
        return logits


def _no_vocabulary() -> Vocabulary:
    raise AssertionError("no sequence has a grammar")


@dataclass
class Side:
    """One of the two runners."""

    runner: Runner
    memory: EngineMemory
    device: ShownDevice
    model: ShownModel

    @staticmethod
    def open(config: EngineConfig, device: ShownDevice) -> "Side":
        files = resolve_files(config)
        model_config = complete_config(load_model_config(files), config.model_impl)
        plan = plan_memory(config, device, model_config, stored_tensors(files))

        def load() -> Any:
            return load_model(device, files, model_config, plan)

        compiler = GrammarCompiler(_no_vocabulary)
        runner, memory = make_runner(config, device, LoadedModel(load(), load), plan, compiler)
        assert runner.model.model is not None
        side = Side(runner, memory, device, ShownModel(runner.model.model))
        runner.replace_model(side.model)
        runner.capture_graphs()
        return side

    def show_model(self) -> None:
        """Show the logits of the model that the runner has now."""
        assert self.runner.model.model is not None
        self.model = ShownModel(self.runner.model.model)
        self.runner.replace_model(self.model)
        self.runner.capture_graphs()


@dataclass
class Pair:
    """Both runners. Blocks are allocated in scattered order; sequences are greedy. `lengths`: tokens with KV."""

    eager: Side
    recorded: Side
    free: list[int]
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @staticmethod
    def open(folder: Path | str, *, device: type[ShownDevice] = ShownDevice, **settings: Any) -> "Pair":
        given = {"model": str(folder), "dtype": "bfloat16", "num_gpu_blocks_override": 64, "max_num_seqs": 8}
        configs = [EngineConfig(**{**given, **settings, "enforce_eager": eager}) for eager in (True, False)]
        sides = [Side.open(config, device()) for config in configs]
        blocks = torch.randperm(int({**given, **settings}["num_gpu_blocks_override"]))
        return Pair(*sides, free=blocks.tolist())

    def both(self, plan: StepPlan) -> StepResult:
        """Run a plan on both; assert equal logits and tokens."""
        want, got = (side.runner.run(plan) for side in (self.eager, self.recorded))
        assert (want.error, got.error) == (None, None)
        assert [seq.token_ids for seq in got.seqs] == [seq.token_ids for seq in want.seqs]
        if want.seqs:
            assert self.eager.model.seen is not None
            assert self.recorded.model.seen is not None
            assert self.recorded.model.seen.isfinite().all()
            assert self.recorded.model.seen.equal(self.eager.model.seen)
        return want

    def add(
        self,
        seq_id: int,
        tokens: list[int],
        *,
        prefix_of: int | None = None,
        num_prefix: int = 0,
        images: tuple[ImageSpan, ...] = (),
    ) -> None:
        """Start a sequence; its first `num_prefix` tokens use the blocks of the cached prefix of another one.

        The tokens of `images` have the positions of images, but the embeddings of tokens.
        """
        blocks = [] if prefix_of is None else self.tables[prefix_of][: num_prefix // 16]
        self.tokens[seq_id], self.tables[seq_id], self.lengths[seq_id] = list(tokens), list(blocks), num_prefix
        params = SamplingParams(temperature=0, max_tokens=10000)
        new = NewSeq(seq_id=seq_id, token_ids=tokens, num_prompt_tokens=len(tokens), params=params, images=images)
        step = self._step(seq_id, len(tokens) - num_prefix, table_start=0)
        self._append(self.both(StepPlan(step_id=0, new_seqs=[new], seqs=[step])))

    def decode(self, seq_ids: list[int], **plan: Any) -> None:
        steps = [self._step(seq_id, 1) for seq_id in seq_ids]
        self._append(self.both(StepPlan(step_id=0, seqs=steps, **plan)))

    def run_ahead(self, plans: list[list[tuple[int, int]]]) -> None:
        """Start plans of (sequence, number of tokens) before the results of others are known; a new one has 10 tokens.

        All tokens must be equal.
        """
        waits: list[list[Callable[[], StepResult]]] = [[], []]
        for chosen in plans:
            plan = StepPlan(step_id=0)
            for seq_id, num_tokens in chosen:
                if seq_id not in self.lengths:
                    self.tokens[seq_id], self.tables[seq_id], self.lengths[seq_id] = list(range(10)), [], 0
                    params = SamplingParams(temperature=0, max_tokens=10000)
                    prompt = self.tokens[seq_id]
                    plan.new_seqs.append(NewSeq(seq_id=seq_id, token_ids=prompt, num_prompt_tokens=10, params=params))
                plan.seqs.append(self._step(seq_id, num_tokens))
                plan.seqs[-1].sample = self.lengths[seq_id] >= len(self.tokens[seq_id])
            for side, started in zip((self.eager, self.recorded), waits, strict=True):
                started.append(side.runner.start(plan))
        eager, recorded = ([wait() for wait in started] for started in waits)
        assert [result.error for result in (*eager, *recorded)] == [None] * 2 * len(plans)
        assert [result.seqs for result in recorded] == [result.seqs for result in eager]

    def verify(self, seq_id: int, drafts: list[int]) -> None:
        """Decode with drafts."""
        step = self._step(seq_id, 1 + len(drafts))
        step.num_tokens, step.draft_token_ids = 1, drafts
        result = self.both(StepPlan(step_id=0, seqs=[step]))
        self.lengths[seq_id] += len(result.seqs[0].token_ids) - 1 - len(drafts)
        self._append(result)

    def drop(self, seq_id: int) -> None:
        """Preempt or finish a sequence."""
        self.both(StepPlan(step_id=0, dropped_seqs=[seq_id]))
        used = {block for i, table in self.tables.items() if i != seq_id for block in table}
        self.free[:0] = [block for block in self.tables.pop(seq_id) if block not in used]
        del self.lengths[seq_id]

    def swap(self, seq_id: int, host: list[int]) -> None:
        """Move all blocks of a sequence to the host and back to other blocks."""
        old = self.tables[seq_id]
        self.both(StepPlan(step_id=0, swap_out=list(zip(old, host[: len(old)], strict=True))))
        new = [self.free.pop() for _ in old]
        swap_in = list(zip(host[: len(new)], new, strict=True))
        self.free[:0] = old
        self.tables[seq_id] = new
        step = self._step(seq_id, 1, table_start=0)
        self._append(self.both(StepPlan(step_id=0, seqs=[step], swap_in=swap_in)))

    def run_randomly(self, steps: int, *, seed: int = 5, most: int = 9, max_length: int = 80) -> None:
        """Start, decode and drop sequences at random, up to `most` at a time, and drop all at the end."""
        chance = random.Random(seed)
        for _ in range(steps):
            running = sorted(self.lengths)
            for seq_id in [i for i in running if self.lengths[i] > max_length or chance.random() < 0.05]:
                self.drop(seq_id)
            running = sorted(self.lengths)
            if len(running) < most and chance.random() < 0.4:
                seq_id = next(i for i in range(most) if i not in self.lengths)
                self.add(seq_id, [chance.randrange(3, 250) for _ in range(chance.randrange(1, max_length // 2))])
            elif running:
                self.decode(chance.sample(running, chance.randrange(1, len(running) + 1)))
        for seq_id in sorted(self.lengths):
            self.drop(seq_id)

    def mix_randomly(self, steps: int, *, seed: int = 5, most: int = 9, max_length: int = 80) -> None:
        """Run steps of prompts, chunks of them, drafts and decodes of up to `most` sequences; drop all at the end."""
        chance = random.Random(seed)
        for _ in range(steps):
            for seq_id in [i for i in sorted(self.lengths) if self.lengths[i] > max_length or chance.random() < 0.1]:
                self.drop(seq_id)
            self._mix(chance.sample(range(most), chance.randrange(1, most + 1)), chance)
        for seq_id in sorted(self.lengths):
            self.drop(seq_id)

    def _mix(self, seq_ids: list[int], chance: random.Random) -> None:
        plan = StepPlan(step_id=0)
        for seq_id in seq_ids:
            if seq_id not in self.lengths:
                prompt = [chance.randrange(3, 250) for _ in range(chance.choice((1, 2, 7, 16, 40)))]
                self.tokens[seq_id], self.tables[seq_id], self.lengths[seq_id] = prompt, [], 0
                params = SamplingParams(temperature=0, max_tokens=10000)
                new = NewSeq(seq_id=seq_id, token_ids=[*prompt], num_prompt_tokens=len(prompt), params=params)
                plan.new_seqs.append(new)
            missing = len(self.tokens[seq_id]) - self.lengths[seq_id]
            num_tokens = chance.choice((missing, chance.randrange(1, missing + 1)))
            drafts = chance.choices(self.tokens[seq_id], k=chance.choice((0, 0, 1, 3))) if num_tokens == missing else []
            step = self._step(seq_id, num_tokens + len(drafts))
            step.num_tokens, step.draft_token_ids, step.sample = num_tokens, drafts, num_tokens == missing
            plan.seqs.append(step)
        result = self.both(plan)
        for seq in result.seqs:
            drafts = next(step.draft_token_ids for step in plan.seqs if step.seq_id == seq.seq_id)
            self.lengths[seq.seq_id] += len(seq.token_ids) - 1 - len(drafts)
        self._append(result)

    def _step(self, seq_id: int, num_tokens: int, table_start: int | None = None) -> SeqStep:
        start, table = self.lengths[seq_id], self.tables[seq_id]
        known = len(table) if table_start is None else table_start
        while len(table) * 16 < start + num_tokens:
            table.append(self.free.pop())
        blocks = [table[known:]] if len(table) > known else []
        self.lengths[seq_id] += num_tokens
        return SeqStep(
            seq_id=seq_id, start=start, num_tokens=num_tokens, sample=True, table_start=known, block_ids=blocks
        )

    def _append(self, result: StepResult) -> None:
        for seq in result.seqs:
            self.tokens[seq.seq_id] += seq.token_ids
