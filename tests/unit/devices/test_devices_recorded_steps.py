"""Recorded decode steps give the logits of eager steps, bit for bit; changes of the engine end or repeat recordings."""

import errno
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo_engine.devices import recorded_steps
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.recorded_steps import RecordedSteps, may_replay
from octavo_engine.ops import recording, recording_pool
from octavo_engine.ops.attention import ForwardContext
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.rank_group import Group
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.plan import SeqStep, StepPlan
from octavo_engine.wire.records import ImageSpan
from octavo_testing.decode_pairs import Pair, make_long_tiny
from octavo_testing.paged import PagedDriver
from octavo_testing.ranks import load_part, run_ranks
from octavo_testing.tiny_models import make_tiny
from octavo_testing.tiny_vision import make_tiny_vision

LONGEST = 700

pytestmark = pytest.mark.skipif(native_library() is None, reason="the kernels are not available")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: make_tiny(name, root) if name == "gpt2" else make_long_tiny(name, root, max_model_len=LONGEST)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def num_replays(pair: Pair, work: Callable[[], object]) -> int:
    """Return how many steps of `work` did not run the model's Python code."""
    before = [side.model.forwards for side in (pair.eager, pair.recorded)]
    work()
    after = [side.model.forwards for side in (pair.eager, pair.recorded)]
    return (after[0] - before[0]) - (after[1] - before[1])


def decode(pair: Pair, *seq_ids: int, steps: int = 4) -> None:
    for _ in range(steps):
        pair.decode(list(seq_ids))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.endswith("recorded_steps")]


def test_tokens_after_an_image_are_replayed_at_their_positions(tmp_path: Path) -> None:
    """An image of 3 x 4 tokens takes 4 positions, so those after it differ from places by 8."""
    pair = Pair.open(make_tiny_vision("qwen3_vl", tmp_path))
    pair.add(0, prompt(25), images=(ImageSpan(start=6, length=12, digest=b"", grid=(3, 4)),))
    pair.add(1, prompt(9))
    assert num_replays(pair, lambda: decode(pair, 0, 1, steps=9)) == 7
    assert pair.eager.model.positions is not None
    assert pair.eager.model.positions.tolist() == [pair.lengths[0] - 1 - 8, pair.lengths[1] - 1]
    assert num_replays(pair, lambda: pair.verify(0, [8])) == 1


#: Models that transformers runs. The last operator of Cohere 2 is torch's.
FAMILIES = ("llama", "qwen3", "gemma3", "glm4", "olmo3", "cohere2")


@pytest.mark.parametrize(
    ("name", "impl"), [("llama", "octavo"), ("qwen3", "octavo"), ("gemma3", "octavo"), ("cohere2", "transformers")]
)
def test_replays_equal_eager_steps(folder: Callable[[str], Path], name: str, impl: Any) -> None:
    pair = Pair.open(folder(name), num_gpu_blocks_override=130, swap_space=0.01, model_impl=impl)
    pair.add(0, prompt(10))
    assert num_replays(pair, lambda: decode(pair, 0, steps=9)) == 7
    pair.add(1, prompt(600, 1))  # contexts of several parts, which are merged
    pair.add(2, prompt(5, 2))
    assert num_replays(pair, lambda: decode(pair, 1)) == 4
    assert num_replays(pair, lambda: decode(pair, 0, 1, 2, steps=20)) == 18
    pair.drop(0)
    pair.add(0, pair.tokens[0])  # as after a preemption
    pair.add(3, [*pair.tokens[1][:320], 7, 8], prefix_of=1, num_prefix=320)
    decode(pair, 2, 3, 0)
    pair.swap(3, list(range(30)))
    assert num_replays(pair, lambda: decode(pair, 3, 1, 2, steps=3)) == 3


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite each piece of the pool once its tensor is gone, and between the same calls of each replay."""

    class Region(recording_pool._Region):
        def __init__(self, num_bytes: int) -> None:
            super().__init__(num_bytes)
            self._pieces = Pieces(self.memory)

    class Pieces(dict[int, int]):
        def __init__(self, memory: Any) -> None:
            self.memory = memory

        def pop(self, begin: int) -> int:  # type: ignore[override]
            poison = partial(self.memory[begin : self[begin]].fill, 0xFF)
            poison()
            if (recorded := recording._current.get()) is not None:
                recorded.append_operator(poison)
            return super().pop(begin)

    monkeypatch.setattr(recording_pool, "_Region", Region)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(("name", "impl"), [("gemma3", "octavo"), *((name, "transformers") for name in FAMILIES)])
def test_the_pools_contents_do_not_matter(folder: Callable[[str], Path], name: str, impl: Any) -> None:
    pair = Pair.open(folder(name), model_impl=impl)
    pair.add(0, prompt(300))
    pair.add(1, prompt(20))
    before, graphs = pair.recorded.model.forwards, pair.recorded.device.graphs
    assert graphs is not None
    for seq_ids in ([0, 1], [1], [0, 1], [0]) * 4:
        pair.decode(seq_ids)
        graphs.pool.fill(0xFF)
    assert pair.recorded.model.forwards == before + 4


class RecordingDriver(PagedDriver):
    steps: RecordedSteps

    def run_model(self, inputs: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        step: Any = SimpleNamespace(input_ids=inputs, positions=positions)
        hidden = self.steps.run(step, ctx)
        return super().run_model(inputs, positions, ctx) if hidden is None else hidden


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("name", ["llama", "olmo3"])
def test_ranks_repeat_their_exchanges(folder: Callable[[str], Path], name: str) -> None:
    """The norms of OLMo 3 exchange values between operators of torch."""
    files = resolve_model(str(folder(name)))

    def run(group: Group) -> None:
        model = load_part(files, group, impl="transformers", dtype=torch.bfloat16, max_model_len=LONGEST)
        backends = [CpuDevice().attention_backend(model.kv_specs(), 16, torch.bfloat16) for _ in range(2)]
        eager, recording = PagedDriver(model, backend=backends[0]), RecordingDriver(model, backend=backends[1])
        recording.steps = RecordedSteps(model.forward, model.constants())
        for tokens in (prompt(20), [5], [6], [7], [8]):
            assert recording.feed({0: tokens})[0].equal(eager.feed({0: tokens})[0])
        graph = recording.steps.graphs[1]
        assert graph is not None
        assert graph.recording.has_exchanged

    run_ranks(2, run)


@pytest.mark.parametrize("impl", ["octavo", "transformers"])
def test_other_threads_need_another_recording(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, impl: Any
) -> None:
    pair = Pair.open(folder("llama"), model_impl=impl)
    pair.add(0, prompt(600))
    decode(pair, 0)
    torch.set_num_threads(2)
    recorded = list[tuple[str, int]]()
    append = recording.Recording.append

    def note(self: recording.Recording, kernel: Any, arguments: tuple[Any, ...], replay: Any) -> None:
        recorded.append((kernel.__name__, arguments[-1]))
        append(self, kernel, arguments, replay)

    monkeypatch.setattr(recording.Recording, "append", note)
    assert num_replays(pair, lambda: decode(pair, 0)) == 2
    assert {threads for name, threads in recorded if name == "octavo_linear"} == {2}


@pytest.mark.parametrize("name", ["llama", "cohere2"])
@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_restored_memory_is_used(folder: Callable[[str], Path], name: str, tag: Any) -> None:
    pair = Pair.open(folder(name))
    pair.add(0, prompt(40))
    decode(pair, 0)
    pair.drop(0)
    for side in (pair.eager, pair.recorded):
        side.memory.release(tag)
    other = torch.randn(1 << 20)  # takes the memory that was released
    for side in (pair.eager, pair.recorded):
        side.memory.restore(tag)
        if tag == "weights":
            side.show_model()
    pair.add(0, prompt(40))
    assert num_replays(pair, lambda: decode(pair, 0, steps=5)) == 3
    assert other.isfinite().all()


def test_no_step_runs_on_a_released_cache(folder: Callable[[str], Path]) -> None:
    pair = Pair.open(folder("llama"))
    pair.add(0, prompt(40))
    decode(pair, 0)
    pair.recorded.memory.release("kv_cache")
    step = SeqStep(seq_id=0, start=44, num_tokens=1, sample=True)
    assert "released" in (pair.recorded.runner.run(StepPlan(step_id=0, seqs=[step])).error or "")


@pytest.mark.parametrize("failing_step", [1, 2])
def test_an_error_ends_its_step_only(folder: Callable[[str], Path], failing_step: int) -> None:
    pair = Pair.open(folder("llama"))
    pair.add(0, prompt(12))
    decode(pair, 0, steps=failing_step - 1)

    def fail(inputs: object) -> None:
        raise RuntimeError("the kernel broke")

    pair.recorded.model.before = fail
    step = SeqStep(seq_id=0, start=pair.lengths[0], num_tokens=1, sample=True)
    assert pair.recorded.runner.run(StepPlan(step_id=0, seqs=[step])).error == "RuntimeError: the kernel broke"
    pair.recorded.model.before = None
    assert num_replays(pair, lambda: decode(pair, 0, steps=6)) == 5


@pytest.mark.parametrize(
    ("name", "settings", "operator"),
    [
        ("llama", {"dtype": "float32"}, "linear"),
        ("llama", {"dtype": "float16"}, "aten.hypot_.default"),
        ("llama", {"block_size": 4}, ""),
        ("qwen3_moe", {}, "aten.bincount.default"),
        ("granitemoe", {}, "aten.bincount.default"),
    ],
    ids=["fp32", "fp16", "blocks", "experts", "transformers-experts"],
)
def test_models_that_cannot_be_recorded_are_eager_with_one_line(
    folder: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    name: str,
    settings: dict[str, Any],
    operator: str,
) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair.open(folder(name), **settings)
    pair.add(0, prompt(12))
    assert num_replays(pair, lambda: decode(pair, 0)) == 0
    (line,) = lines(caplog)
    assert operator in line


def test_layer_norms_are_repeated(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair.open(folder("gpt2"))
    pair.add(0, prompt(12))
    assert num_replays(pair, lambda: decode(pair, 0)) == 2
    assert not lines(caplog)


def test_without_kernels_steps_are_eager_with_one_line(
    folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OCTAVO_NATIVE", "0")
    native_library.cache_clear()
    try:
        pair = Pair.open(folder("llama"))
        pair.add(0, prompt(12))
        assert num_replays(pair, lambda: decode(pair, 0)) == 0
    finally:
        native_library.cache_clear()
    assert len(lines(caplog)) == 1


def test_a_planted_operator_is_named(folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair.open(folder("llama"))
    pair.recorded.model.before = lambda inputs: inputs.nonzero()
    pair.add(0, prompt(12))
    assert num_replays(pair, lambda: decode(pair, 0)) == 0
    (line,) = lines(caplog)
    assert "aten.nonzero.default" in line


def test_a_lack_of_memory_makes_steps_eager(
    folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(recording_pool, "_REGION_BYTES", 1 << 60)
    pair = Pair.open(folder("llama"))
    pair.add(0, prompt(12))
    decode(pair, 0)
    (line,) = lines(caplog)
    assert "1.00 EiB" in line
    assert "--enforce-eager" in line


@pytest.mark.parametrize(
    "error", [MemoryError("no memory for 64 MiB"), OSError(errno.ENOMEM, "Cannot allocate memory")]
)
@pytest.mark.parametrize("has_exchanged", [False, True])
def test_a_step_is_not_repeated_after_an_exchange_with_other_ranks(has_exchanged: bool, error: Exception) -> None:
    """The others took part once: a second all-reduce would add their next layer, and a second `recv` would wait."""
    exchanges: list[str] = []
    exchange = recording.recordable(exchanges.append)

    def forward(*inputs: object) -> torch.Tensor:
        if has_exchanged:
            exchange("recv")
        raise error

    steps = RecordedSteps(forward)
    inputs: Any = SimpleNamespace(input_ids=torch.tensor([5]), positions=torch.tensor([0]))
    context: Any = SimpleNamespace(backend=SimpleNamespace(begin_step=lambda batch: None), batch=None)
    assert steps.run(inputs, context) is None
    if has_exchanged:
        with pytest.raises(type(error)):
            steps.run(inputs, context)
    else:
        assert steps.run(inputs, context) is None


def run_rows(steps: RecordedSteps, *numbers: int) -> list[bool]:
    """Run a step of each number of rows; return which were replayed or recorded. Their outputs are checked."""
    made = []
    for rows in numbers:
        ids = torch.arange(rows) + len(made)
        inputs: Any = SimpleNamespace(input_ids=ids, positions=ids)
        hidden = steps.run(inputs, CONTEXT)
        assert hidden is None or hidden.equal(wide_rows(ids))
        made.append(hidden is not None)
    return made


CONTEXT: Any = SimpleNamespace(backend=SimpleNamespace(begin_step=lambda batch: None), batch=None)


def wide_rows(ids: torch.Tensor, *_: object) -> torch.Tensor:
    return ids[:, None].float() * torch.arange(1000.0) + 1


def test_steps_with_large_outputs_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of 1000 values of 4 bytes, of which two tensors are there at a time, need 32,000 bytes."""
    monkeypatch.setattr(recorded_steps, "_MOST_OUTPUT_BYTES", 50_000)
    steps = RecordedSteps(wide_rows)
    assert run_rows(steps, 4, 4, 4, 9, 9, 9, 4, 4, 4) == [False, True, True, False, True, False, False, True, True]
    assert steps.pool.used_bytes <= 50_000


def test_no_more_is_recorded_once_the_recordings_have_too_many_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_steps, "_MOST_OPERATORS", 8)  # two recordings of four
    steps = RecordedSteps(wide_rows)
    assert run_rows(steps, 1, 2, 3, 2, 3, 1, 1, 4, 4, 2) == [False] * 3 + [True] * 2 + [False] * 4 + [True]
    assert [rows for rows, graph in steps.graphs.items() if graph] == [2, 3]


def test_all_numbers_of_rows_share_the_memory(folder: Callable[[str], Path]) -> None:
    pair = Pair.open(folder("llama"))
    for seq_id in range(8):
        pair.add(seq_id, prompt(5, seq_id))
    graphs = pair.recorded.device.graphs
    assert graphs is not None

    def use(*numbers: int) -> int:
        for rows in numbers:
            decode(pair, *range(rows), steps=3)
        return graphs.pool.used_bytes

    largest = use(8)
    assert 0 < use(*range(1, 9)) == use(*range(8, 0, -1)) == largest


@pytest.mark.parametrize("name", ["llama", "cohere2"])
def test_steps_with_drafts_are_replayed(folder: Callable[[str], Path], name: str) -> None:
    """Drafts of the greedy tokens are accepted, others rejected; the tokens are those of single steps."""
    pair = Pair.open(folder(name))
    for seq_id in (1, 2):
        pair.add(seq_id, prompt(15, 0))
    decode(pair, 1, steps=12)
    want = pair.tokens[1]
    while len(pair.tokens[2]) < len(want) - 3:
        right = want[len(pair.tokens[2]) :][:2]
        pair.verify(2, [right[0], (right[1] + 1) % 30])
    assert pair.tokens[2] == want[: len(pair.tokens[2])]
    assert len(pair.tokens[2]) == 16 + 2 * 5
    graphs = pair.recorded.device.graphs
    assert graphs is not None
    assert graphs.graphs[3] is not None


def decoding(**fields: Any) -> SeqStep:
    return SeqStep(**{"seq_id": 1, "start": 5, "num_tokens": 1, "sample": True, **fields})


@pytest.mark.parametrize(
    "other",
    [
        decoding(num_tokens=2),
        decoding(num_tokens=0, logits_from=1),
        decoding(logits_from=1),
        decoding(num_prompt_logprobs=1),
    ],
    ids=["prompt", "fork", "fork-with-token", "prompt-logprobs"],
)
def test_only_plain_decode_steps_may_be_replayed(other: SeqStep) -> None:
    assert may_replay(StepPlan(step_id=0, seqs=[decoding()]))
    assert not may_replay(StepPlan(step_id=0, seqs=[decoding(), other]))


def test_enforce_eager_records_nothing(folder: Callable[[str], Path]) -> None:
    pair = Pair.open(folder("llama"))
    assert pair.eager.device.graphs is None
