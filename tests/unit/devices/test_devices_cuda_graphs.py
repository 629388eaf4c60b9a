"""CUDA graphs of decode steps, by a stand-in that repeats the captured work: they give the logits of eager steps."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.cuda_graphs import GraphedSteps, capture_sizes
from octavo_engine.devices.step_inputs import StepInputs, StepLimits
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.records import ImageSpan
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.sleep import MemoryTag
from octavo_testing import decode_pairs
from octavo_testing.decode_pairs import GraphedDevice, Pair, make_long_tiny
from octavo_testing.tiny_vision import make_tiny_vision
from torch import Tensor

SETTINGS: dict[str, Any] = {"device": GraphedDevice, "dtype": "float32", "max_num_seqs": 12}
SIZES = (1, 2, 4, 8)  # of the graphs of `GraphedDevice`
DECODE = SeqStep(seq_id=0, start=2, num_tokens=1, sample=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_long_tiny("qwen3", tmp_path_factory.mktemp("models"), max_model_len=90)


def num_forwards(pair: Pair, work: Callable[[], object]) -> int:
    """Return how often `work` ran the model's code, in graphs and outside of them."""
    before = pair.recorded.model.forwards
    work()
    return pair.recorded.model.forwards - before


def test_graphs_equal_eager_steps(folder: Path) -> None:
    Pair.open(folder, **SETTINGS).run_randomly(60)


def test_tokens_after_an_image_are_replayed_at_their_positions(tmp_path: Path) -> None:
    """An image of 3 x 4 tokens takes 4 positions, so those after it differ from places by 8."""
    pair = Pair.open(make_tiny_vision("qwen2_vl", tmp_path), **SETTINGS)
    pair.add(0, list(range(5, 30)), images=(ImageSpan(start=6, length=12, digest=b"", grid=(3, 4)),))
    pair.add(1, [5, 6, 7])
    graphs = pair.recorded.device.graphed
    assert graphs is not None
    for _ in range(4):
        pair.decode([0, 1])
        assert graphs._tokens[1, :2].tolist() == [pair.lengths[0] - 1 - 8, pair.lengths[1] - 1]


def test_no_step_captures_a_graph(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pair = Pair.open(folder, **SETTINGS)
    assert pair.recorded.model.forwards == len(SIZES)
    assert [r.args[:2] for r in caplog.records if r.msg.startswith("captured")] == [(len(SIZES), 8)]  # type: ignore[index]
    for seq_id in range(3):
        pair.add(seq_id, [5, 6, 7])
    assert num_forwards(pair, lambda: pair.decode([0])) == 1
    assert num_forwards(pair, lambda: pair.decode([0, 1, 2])) == 1


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["kv_cache", "weights"], ["weights", "kv_cache"]], ids=str)
def test_graphs_are_captured_before_a_sleeper_is_awake(folder: Path, tags: list[MemoryTag]) -> None:
    pair = Pair.open(folder, **SETTINGS)
    memory, runner = pair.recorded.memory, pair.recorded.runner
    for tag in tags:
        memory.release(tag)
    for tag in reversed(tags[1:]):
        memory.restore(tag)
        assert not getattr(runner.model._graphs, "_graphs", None)
    memory.restore(tags[0])
    graphs = pair.recorded.device.graphed
    assert graphs is not None
    assert sorted(graphs._graphs) == list(SIZES)
    captured = dict(graphs._graphs)
    new = NewSeq(seq_id=0, token_ids=[5, 6], num_prompt_tokens=2, params=SamplingParams(temperature=0))
    prompt = SeqStep(seq_id=0, start=0, num_tokens=2, sample=True, block_ids=[[3]])
    for plan in (StepPlan(step_id=0, new_seqs=[new], seqs=[prompt]), StepPlan(step_id=0, seqs=[DECODE])):
        assert runner.run(plan).error is None
    assert graphs._graphs == captured


def test_steps_of_other_kinds_are_eager(folder: Path) -> None:
    pair = Pair.open(folder, **SETTINGS)
    for seq_id in range(9):
        pair.add(seq_id, [5, 6, 7])
    graphs = pair.recorded.device.graphed
    assert graphs is not None
    graphs._graphs = dict.fromkeys(SIZES)  # type: ignore[assignment]  # a replay fails
    pair.verify(0, [8, 9])
    pair.decode(list(range(9)))  # more rows than the largest graph
    graphs._most_keys = 4
    pair.decode([0, 1])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("operation not permitted when stream is capturing\nmore"), "when stream is capturing"),
        (torch.OutOfMemoryError("CUDA out of memory."), "CUDA out of memory."),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=str,
)
def test_a_capture_that_fails_makes_steps_eager_with_one_warning(
    folder: Path, error: Exception, reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise error

    monkeypatch.setattr(decode_pairs, "repeated", fail)
    pair = Pair.open(folder, **SETTINGS)
    pair.add(0, [5, 6, 7])
    for _ in range(3):
        pair.decode([0])
    (line,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert line.getMessage().endswith(reason)


def test_the_release_of_the_kv_cache_frees_the_graphs(folder: Path) -> None:
    pair = Pair.open(folder, **SETTINGS)
    pair.add(0, [5, 6, 7])
    pair.decode([0])
    before = pair.recorded.device.graphed
    for side in (pair.eager, pair.recorded):
        side.memory.release("kv_cache")
        side.memory.restore("kv_cache")
    assert pair.recorded.device.graphed is not before
    pair.drop(0)
    pair.add(1, [5, 6, 7])
    pair.decode([1])


def stale_lengths(self: GraphedSteps, inputs: StepInputs, rows: int, size: int) -> None:
    kept = self._lengths.clone()
    FILL(self, inputs, rows, size)
    self._lengths.copy_(kept)


def writing_padding(self: GraphedSteps, inputs: StepInputs, rows: int, size: int) -> None:
    FILL(self, inputs, rows, size)
    self._slots[rows:size] = inputs.attention.slots[0]


def stale_tables(self: GraphedSteps, inputs: StepInputs, rows: int, size: int) -> None:
    kept = self._tables.clone()
    FILL(self, inputs, rows, size)
    self._tables.copy_(kept)


FILL = GraphedSteps._fill


@pytest.mark.parametrize("mutant", [stale_lengths, writing_padding, stale_tables])
def test_a_mutant_is_caught(folder: Path, mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedSteps, "_fill", mutant)
    with pytest.raises(AssertionError):
        Pair.open(folder, **SETTINGS).run_randomly(60)


def test_an_input_that_does_not_stay_in_place_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: GraphedSteps, size: int, backend: Any) -> Callable[[], Tensor]:
        captured = STEP(self, size, backend)
        self._tokens = self._tokens.clone()
        return captured

    monkeypatch.setattr(GraphedSteps, "_step", step)
    with pytest.raises(AssertionError):
        Pair.open(folder, **SETTINGS).run_randomly(60)


STEP = GraphedSteps._step


def test_sizes_end_with_the_largest_step() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(6) == [1, 2, 4, 6]
    assert capture_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert capture_sizes(1000)[-2:] == [992, 1000]
    assert capture_sizes(2000)[-2:] == [992, 1024]
    limits = StepLimits(max_num_seqs=4, max_model_len=10, table_width=2)
    graphs = GraphedSteps(None, limits, (4, 1), None, torch.device("cpu"), free_bytes=lambda: 0)  # type: ignore[arg-type]
    assert graphs._sizes == [1, 4]
