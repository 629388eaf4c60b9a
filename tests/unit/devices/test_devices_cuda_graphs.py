"""CUDA graphs of steps, by a stand-in that repeats the captured work: they give the logits of eager steps."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.cuda_calls import PinnedCopy
from octavo_engine.devices.cuda_graphs import Bucket, GraphedSteps, capture_sizes, prompt_buckets
from octavo_engine.devices.step_inputs import PlacedStep, StepArrays
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.records import ImageSpan
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.sleep import MemoryTag
from octavo_testing import decode_pairs
from octavo_testing.decode_pairs import BUCKETS, GraphedDevice, Pair, make_long_tiny
from octavo_testing.tiny_vision import make_tiny_vision
from torch import Tensor

SETTINGS: dict[str, Any] = {"device": GraphedDevice, "dtype": "float32", "max_num_seqs": 12}
DECODE = SeqStep(seq_id=0, start=2, num_tokens=1, sample=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_long_tiny("qwen3", tmp_path_factory.mktemp("models"), max_model_len=90)


def num_forwards(pair: Pair, work: Callable[[], object]) -> int:
    """Return how often `work` ran the model's code, in graphs and outside of them."""
    before = pair.recorded.model.forwards
    work()
    return pair.recorded.model.forwards - before


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[Bucket | None]:
    """List the graph of each step; None: of a step that is eager."""
    taken: list[Bucket | None] = []
    place, write = GraphedSteps.place, GraphedSteps._write

    def listed(self: GraphedSteps, arrays: StepArrays) -> PlacedStep | None:
        found = place(self, arrays)
        if found is None:
            taken.append(None)
        return found

    def written(self: GraphedSteps, bucket: Bucket, arrays: StepArrays) -> None:
        write(self, bucket, arrays)
        if len(arrays.seq_lens):
            taken.append(bucket)

    monkeypatch.setattr(GraphedSteps, "place", listed)
    monkeypatch.setattr(GraphedSteps, "_write", written)
    return taken


def test_graphs_equal_eager_steps(folder: Path) -> None:
    Pair.open(folder, **SETTINGS).run_randomly(30)


def test_graphs_of_prompts_chunks_and_drafts_equal_eager_steps(folder: Path, placed: list[Bucket | None]) -> None:
    Pair.open(folder, **SETTINGS).mix_randomly(30)
    assert {None, *BUCKETS[-3:]} <= {*placed}


def test_graphs_fill_in_the_tokens_of_the_step_before(folder: Path, placed: list[Bucket | None]) -> None:
    """Each step starts before the host knows the tokens of the one before, in decodes and beside a chunk."""
    pair = Pair.open(folder, **SETTINGS, async_scheduling=True)
    for seq_id in range(3):
        pair.add(seq_id, [5 + seq_id, 6, 7])
    placed.clear()
    pair.run_ahead([[(0, 1), (1, 1), (2, 1)], [(0, 1), (2, 1)], [(1, 1), (3, 6), (0, 1)], [(3, 4), (0, 1), (1, 1)]])
    assert placed == [BUCKETS[2], BUCKETS[1], BUCKETS[4], BUCKETS[4]]


def test_tokens_after_an_image_are_replayed_at_their_positions(tmp_path: Path) -> None:
    """An image of 3 x 4 tokens takes 4 positions, so those after it differ from places by 8."""
    pair = Pair.open(make_tiny_vision("qwen2_vl", tmp_path), **SETTINGS)
    pair.add(0, list(range(5, 30)), images=(ImageSpan(start=6, length=12, digest=b"", grid=(3, 4)),))
    pair.add(1, [5, 6, 7])
    graphs = pair.recorded.device.graphed
    assert graphs is not None
    for _ in range(4):
        pair.decode([0, 1])
        positions = graphs._graphs[BUCKETS[1]].positions
        assert positions.tolist() == [pair.lengths[0] - 1 - 8, pair.lengths[1] - 1]


def test_no_step_captures_a_graph(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pair = Pair.open(folder, **SETTINGS)
    assert pair.recorded.model.forwards == len(BUCKETS)
    assert [r.args[:3] for r in caplog.records if r.msg.startswith("captured")] == [(len(BUCKETS), 8, 60)]  # type: ignore[index]
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
    assert sorted(graphs._graphs) == sorted(BUCKETS)
    captured = dict(graphs._graphs)
    new = NewSeq(seq_id=0, token_ids=[5, 6], num_prompt_tokens=2, params=SamplingParams(temperature=0))
    prompt = SeqStep(seq_id=0, start=0, num_tokens=2, sample=True, block_ids=[[3]])
    for plan in (StepPlan(step_id=0, new_seqs=[new], seqs=[prompt]), StepPlan(step_id=0, seqs=[DECODE])):
        assert runner.run(plan).error is None
    assert graphs._graphs == captured


def test_steps_that_no_graph_fits_are_eager(folder: Path, placed: list[Bucket | None]) -> None:
    pair = Pair.open(folder, **SETTINGS)
    pair.add(0, list(range(5, 49)))  # 44 tokens: a graph of 60 would compute too much padding
    pair.add(1, list(range(5, 66)))  # more tokens than the largest graph
    graphs = pair.recorded.device.graphed
    assert graphs is not None
    graphs._most_keys = 4
    pair.decode([0, 1])
    assert placed == [None, None, None]


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
    folder: Path,
    error: Exception,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    placed: list[Bucket | None],
) -> None:
    def fail(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise error

    monkeypatch.setattr(decode_pairs, "repeated", fail)
    pair = Pair.open(folder, **SETTINGS)
    pair.add(0, [5, 6, 7])
    for _ in range(3):
        pair.decode([0])
    assert placed == [None] * 4
    (line,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert line.getMessage().endswith(reason)


@pytest.mark.parametrize(
    ("error", "captured"),
    [(torch.OutOfMemoryError("CUDA out of memory."), [8, 4, 2, 1]), (RuntimeError("another error"), [60])],
    ids=["memory", "another error"],
)
def test_graphs_for_which_memory_suffices_are_captured(
    folder: Path, error: Exception, captured: list[int], monkeypatch: pytest.MonkeyPatch, placed: list[Bucket | None]
) -> None:
    """Graphs of 10 and 20 tokens fail. After lack of memory, smaller ones are tried; after another error, none."""
    repeated = decode_pairs.repeated

    def fail(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        replay, output = repeated(work)
        if len(output) in (10, 20):
            raise error
        return replay, output

    monkeypatch.setattr(decode_pairs, "repeated", fail)
    pair = Pair.open(folder, **SETTINGS)
    graphs = pair.recorded.device.graphed
    assert graphs is not None
    assert [bucket.num_tokens for bucket in graphs._graphs] == [*{60, *captured} - {*captured}, *captured]
    pair.mix_randomly(5)
    assert None in placed


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


def parts_of(graphs: GraphedSteps, bucket: Bucket) -> tuple[Tensor, ...]:
    return graphs._numbers[: sum(bucket.sizes)].split_with_sizes(bucket.sizes)


def stale_lengths(self: GraphedSteps, bucket: Bucket, arrays: StepArrays) -> None:
    kept = parts_of(self, bucket)[1].clone()
    WRITE(self, bucket, arrays)
    parts_of(self, bucket)[1].copy_(kept)


def writing_padding(self: GraphedSteps, bucket: Bucket, arrays: StepArrays) -> None:
    WRITE(self, bucket, arrays)
    if len(arrays.slots):
        parts_of(self, bucket)[4][len(arrays.slots) :] = int(arrays.slots[0])


def padding_of_a_real_sequence(self: GraphedSteps, bucket: Bucket, arrays: StepArrays) -> None:
    WRITE(self, bucket, arrays)
    if len(arrays.seq_lens) < bucket.num_seqs:
        parts_of(self, bucket)[0][len(arrays.seq_lens)] += 1


def stale_tables(self: GraphedSteps, bucket: Bucket, arrays: StepArrays) -> None:
    kept = self._tables.clone()
    WRITE(self, bucket, arrays)
    self._tables.copy_(kept)


WRITE = GraphedSteps._write


@pytest.mark.parametrize("mutant", [stale_lengths, writing_padding, padding_of_a_real_sequence, stale_tables])
def test_a_mutant_is_caught(folder: Path, mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedSteps, "_write", mutant)
    with pytest.raises(AssertionError):
        Pair.open(folder, **SETTINGS).mix_randomly(60)


def test_an_input_that_does_not_stay_in_place_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(self: GraphedSteps, *arguments: Any) -> Any:
        captured = CAPTURED(self, *arguments)
        self._numbers = self._numbers.clone()
        return captured

    monkeypatch.setattr(GraphedSteps, "_captured", moved)
    with pytest.raises(AssertionError):
        Pair.open(folder, **SETTINGS).mix_randomly(60)


CAPTURED = GraphedSteps._captured


def test_sizes_end_with_the_largest_step() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(6) == [1, 2, 4, 6]
    assert capture_sizes(64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert capture_sizes(1000)[-2:] == [992, 1000]
    assert capture_sizes(2000)[-2:] == [992, 1024]


def test_graphs_of_prompts_compute_at_most_a_quarter_of_padding() -> None:
    sizes = [*range(64, 513, 64), 1024, 2048]
    assert [bucket.num_tokens for bucket in prompt_buckets(8, 8192)] == sizes
    assert [bucket.num_tokens for bucket in prompt_buckets(8, 600)] == [*sizes[:8], 600]
    assert prompt_buckets(8, 3) == [Bucket(3, 4, 3, 1)]
    *small, large, largest = prompt_buckets(100, 2048)
    assert [bucket.num_seqs for bucket in small[:3]] == [65, 101, 101]
    assert (large.least_tokens, largest.least_tokens) == (768, 1536)
    assert all(bucket.least_tokens <= max(1, bucket.num_tokens - 63) for bucket in small)


def test_a_pinned_copy_overwrites_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    target = torch.zeros(3, dtype=torch.int32)
    PinnedCopy(torch.device("cpu")).overwrite(target[:2], torch.tensor([4, 5], dtype=torch.int32))
    assert target.tolist() == [4, 5, 0]
