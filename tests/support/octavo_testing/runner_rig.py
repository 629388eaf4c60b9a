"""A runner on a model whose logits can be computed by hand, and short forms of plans for it."""

from collections.abc import Callable
from typing import Any

import torch
from octavo_engine.devices.cuda_device import is_cuda_failure
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.transfers import Fetch, HostTimer
from octavo_engine.grammar.compiler import GrammarCompiler, Vocabulary
from octavo_engine.ops.attention import AttentionBatch, ForwardContext
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.runner.runner import Runner
from octavo_engine.sampling.grammar_masks import GrammarMasks
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan, StepResult
from octavo_engine.wire.sampling import SamplingParams
from torch import Tensor

VOCAB = 50


class Counting:
    """A model that predicts `id + 1`; `fail_on` raises for an input id, `poison` makes its logits NaN."""

    waiting_operator = None
    tower = None

    def __init__(self) -> None:
        self.fail_on = -1
        self.failure: Exception = RuntimeError("the kernel broke")
        self.poison = -1
        self.head_rows: list[int] = []

    def forward(self, inputs: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        assert (inputs >= 0).all(), "a token that is not known"
        if (inputs == self.fail_on).any():
            raise self.failure
        return inputs[:, None].float()

    def constants(self) -> tuple[Tensor, ...]:
        return ()

    def embed(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError("it has no images")

    def logits(self, hidden: Tensor) -> Tensor:
        self.head_rows.append(len(hidden))
        ids = hidden[:, 0].long()
        logits = torch.nn.functional.one_hot((ids + 1) % VOCAB, VOCAB).float() * 10
        logits[ids == self.poison] = float("nan")
        return logits


class Journal:
    """A backend that records the order of its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin_step(self, batch: AttentionBatch) -> None:
        self.calls.append("forward")

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.calls.append(("copy", pairs))

    def swap_out(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        self.calls.append(("out", pairs))

    def swap_in(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        self.calls.append(("in", pairs))


class RecordedTimer(HostTimer):
    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def seconds(self) -> float:
        self._journal.calls.append("synchronize")
        return super().seconds()


class RecordingDevice(CpuDevice):
    """A CPU that classifies errors as a GPU does, and records calls in the backend's journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def fetch(self) -> Fetch:
        return late_fetch

    def timer(self) -> HostTimer:
        return RecordedTimer(self._journal)

    def synchronize(self) -> None:
        self._journal.calls.append("synchronize")

    def release_unused_memory(self) -> None:
        self._journal.calls.append("release")

    def is_lost(self, error: Exception) -> bool:
        return is_cuda_failure(error)


def no_vocabulary() -> Vocabulary:
    raise AssertionError("nothing here has a grammar")


def late_fetch(values: Tensor) -> Callable[[], Tensor]:
    """Fetch as late as a GPU may: until the host waits, its memory has other numbers."""
    host, kept = torch.full_like(values, 3), values.clone()
    return lambda: host.copy_(kept)


class Rig:
    """`starts_ahead`: plans may start before the results of others are known."""

    def __init__(self, *, starts_ahead: bool = False) -> None:
        self.model, self.backend = Counting(), Journal()
        self.batch = PersistentBatch(
            max_num_seqs=4,
            max_model_len=256,
            block_size=4,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
            starts_ahead=starts_ahead,
        )
        host = torch.zeros(4, 8, dtype=torch.uint8)
        self.compiler = GrammarCompiler(no_vocabulary)
        masks = GrammarMasks(self.compiler, vocab_size=VOCAB)
        self.device = RecordingDevice(self.backend)
        self.runner = Runner(self.model, self.backend, self.batch, masks, self.device, host=host)  # type: ignore[arg-type]

    def start(self, *steps: SeqStep, **plan: Any) -> Callable[[], StepResult]:
        return self.runner.start(StepPlan(step_id=7, seqs=list(steps), **plan))

    def run(self, *steps: SeqStep, **plan: Any) -> StepResult:
        return self.runner.run(StepPlan(step_id=7, seqs=list(steps), **plan))


def new(seq_id: int, *token_ids: int, prompt: int | None = None, **params: Any) -> NewSeq:
    return NewSeq(
        seq_id=seq_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if prompt is None else prompt,
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 99, **params}),
        seed=seq_id,
    )


def step(seq_id: int, start: int, num_tokens: int, **fields: Any) -> SeqStep:
    return SeqStep(seq_id=seq_id, start=start, num_tokens=num_tokens, **{"sample": True, **fields})


def tokens(result: StepResult) -> dict[int, list[int]]:
    assert result.error is None, result.error
    return {seq.seq_id: seq.token_ids for seq in result.seqs}
