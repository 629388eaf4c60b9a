"""`ImageEncoder` with a stand-in for the tower: which images a step encodes, where their rows go, and errors."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.step_inputs import StepInputs
from octavo_engine.media.processed_images import ProcessedImages
from octavo_engine.runner.checkpoint import read_checkpoint
from octavo_engine.runner.image_encoder import ImageEncoder
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.sources.resolve import resolve_files
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.plan import NewSeq, SeqStep, StepCosts, StepPlan
from octavo_engine.wire.records import ImageInput
from octavo_testing.media import InstantWorkers
from octavo_testing.runner_rig import Rig, new, step
from octavo_testing.tiny_vision import make_tiny_vision

IMAGE = 40


class Tower:
    """Makes a row of each pixel. `raises` and `poison` are pixels of an image with which it fails."""

    weights_bytes = activation_bytes = 0

    def __init__(self) -> None:
        self.calls = 0
        self.raises = self.poison = -1

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        pixels = ((inputs["pixels"].flatten() * 0.5 + 0.5) * 255).round()
        if self.raises in pixels:
            raise RuntimeError("the tower broke")
        pixels[pixels == self.poison] = float("nan")
        return pixels[:, None].expand(-1, 3)


class Bench:
    """An encoder with the sequences of a batch. Its plans encode an image when a step has the first token of it."""

    def __init__(self) -> None:
        self.images = ProcessedImages(InstantWorkers(), max_bytes=0)
        self.encoder, self.tower, self.rig = ImageEncoder(self.images, IMAGE, CpuDevice()), Tower(), Rig()
        self.planned: set[bytes] = set()
        self.errors: dict[int, Any] = {}

    def add(self, seq_id: int, token_ids: list[int], *images: ImageInput) -> NewSeq:
        self.images.acquire(f"{seq_id}", images)
        added = new(seq_id, *token_ids)
        added.images = tuple(image.span for image in images)
        self.rig.batch.add(added)
        self.rig.batch._tables[:] = np.arange(self.rig.batch._tables.size).reshape(self.rig.batch._tables.shape)
        return added

    def embed(self, *steps: SeqStep, dropped: tuple[bytes, ...] = ()) -> list[int] | None:
        """Run the encoder for a step; return the first value of each row, -1 for the embedding of a token."""
        plan = StepPlan(step_id=1, seqs=list(steps), dropped_images=list(dropped))
        self.planned -= set(dropped)
        for each in steps:
            for index, image in enumerate(self.rig.batch.seqs[each.seq_id].images):
                is_needed = image.start < each.start + each.num_tokens and each.start < image.end
                if is_needed and image.digest not in self.planned:
                    plan.encode.append((each.seq_id, index))
                    self.planned.add(image.digest)
        self.errors = self.encoder.encode(plan, self.rig.batch.seqs, self.tower)
        inputs = self.rig.batch.inputs(plan)
        assert isinstance(inputs, StepInputs)
        rows = self.encoder.embed(inputs, self.rig.batch.seqs, lambda ids: torch.full((len(ids), 3), -1.0))
        return None if rows is None else rows[:, 0].int().tolist()


def picture(start: int, pixels: bytes, length: int | None = None) -> ImageInput:
    return ImageInput(start=start, length=length or len(pixels), digest=digest(pixels), data=pixels)


def digest(pixels: bytes) -> bytes:
    return pixels.ljust(32, b".")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_rows_take_the_places_of_image_tokens_only(bench: Bench) -> None:
    """The span has a token between the image tokens, and the prompt an image token outside of the span."""
    bench.add(1, [IMAGE, 5, IMAGE, IMAGE, 6, IMAGE, 7], picture(2, b"\x0a\x0b\x0c", length=4))
    assert bench.embed(step(1, 0, 7)) == [-1, -1, 10, 11, -1, 12, -1]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_chunks_have_the_rows_of_their_tokens_and_encode_once(bench: Bench, size: int) -> None:
    bench.add(1, [5, IMAGE, IMAGE, 6, IMAGE, 7, IMAGE, 8], picture(1, b"\x0a\x0b\x0c", length=4), picture(6, b"\x0d"))
    rows = list[int]()
    for start in range(0, 8, size):
        num = min(size, 8 - start)
        rows += bench.embed(step(1, start, num, sample=False)) or [-1] * num
    assert rows == [-1, 10, 11, -1, 12, -1, 13, -1]
    assert bench.tower.calls == 2


def test_a_step_without_image_tokens_has_no_embeddings(bench: Bench) -> None:
    bench.add(1, [5, IMAGE, 6, 7], picture(1, b"\x0a"))
    bench.add(2, [5, 6])
    assert bench.embed(step(1, 2, 2), step(2, 0, 2)) is None
    assert bench.tower.calls == 0


def test_sequences_with_one_image_share_its_rows(bench: Bench) -> None:
    bench.add(1, [IMAGE, 5], picture(0, b"\x0a"))
    bench.add(2, [5, 6, IMAGE], picture(2, b"\x0a"))
    assert bench.embed(step(2, 0, 3), step(1, 0, 2)) == [-1, -1, 10, 10, -1]
    assert bench.tower.calls == 1


def test_rows_are_kept_until_a_plan_drops_them(bench: Bench) -> None:
    bench.add(1, [IMAGE, 5], picture(0, b"\x0a"))
    bench.embed(step(1, 0, 2))
    bench.rig.batch.drop([1])
    bench.add(2, [IMAGE, 5], picture(0, b"\x0b"))
    bench.embed(step(2, 0, 2))
    assert list(bench.encoder._rows) == [digest(b"\x0a"), digest(b"\x0b")]
    bench.add(3, [IMAGE, 5], picture(0, b"\x0a"))
    assert bench.embed(step(3, 0, 2), dropped=(digest(b"\x0b"),)) == [10, -1]
    assert list(bench.encoder._rows) == [digest(b"\x0a")]
    assert bench.tower.calls == 2


def test_an_image_that_is_dropped_and_encoded_in_one_step_has_rows(bench: Bench) -> None:
    bench.add(1, [IMAGE, 5], picture(0, b"\x0a"))
    bench.embed(step(1, 0, 2))
    assert bench.embed(step(1, 0, 2), dropped=(digest(b"\x0a"),)) == [10, -1]
    assert bench.tower.calls == 2


def test_a_step_with_a_token_of_an_image_without_rows_fails(bench: Bench) -> None:
    bench.add(1, [IMAGE, 5], picture(0, b"\x0a"))
    bench.planned.add(digest(b"\x0a"))
    with pytest.raises(KeyError):
        bench.embed(step(1, 0, 2))


def test_the_cost_of_a_token_is_measured_and_seconds_are_taken_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    bench.add(1, [IMAGE, IMAGE, IMAGE, IMAGE], picture(0, b"\x0a\x0b"), picture(2, b"\x0c\x0d"))
    bench.embed(step(1, 0, 2))
    costs = StepCosts(step_s=7.0)
    assert bench.encoder.add_costs(costs) == StepCosts(step_s=7.0, image_token_s=1.0)
    bench.embed(step(1, 2, 2))
    assert bench.encoder.add_costs(costs).image_token_s == pytest.approx(1.1)
    assert bench.encoder.take_seconds() == 5.0
    assert bench.encoder.take_seconds() == 0.0


@pytest.mark.parametrize("fault", ["raises", "poison", "rows"])
def test_a_failing_image_ends_the_sequences_that_have_it(bench: Bench, fault: str) -> None:
    """Also one that reads its blocks and computes no token of it, and one that only samples."""
    setattr(bench.tower, fault, 66) if fault != "rows" else None
    bad = picture(0, b"B", length=2 if fault == "rows" else 1)
    tokens = [IMAGE, IMAGE] if fault == "rows" else [IMAGE, 5]
    bench.add(1, tokens, bad)
    bench.add(2, [*tokens, 6, 7], bad)
    bench.add(3, [IMAGE, 5], picture(0, b"G"))
    rows = bench.embed(step(1, 0, 2), step(2, 2, 2), step(3, 0, 2))
    assert rows == [-1, -1, -1, -1, 71, -1]
    assert {seq_id: error.kind for seq_id, error in bench.errors.items()} == {1: "internal", 2: "internal"}


def test_an_image_that_failed_is_encoded_when_it_is_asked_again(bench: Bench) -> None:
    bench.tower.raises = 66
    bench.add(1, [IMAGE, 5], picture(0, b"B"))
    bench.embed(step(1, 0, 2))
    assert bench.errors
    bench.rig.batch.drop([1])
    bench.tower.raises = -1
    bench.add(2, [IMAGE, 5], picture(0, b"B"))
    assert bench.embed(step(2, 0, 2), dropped=(digest(b"B"),)) == [66, -1]
    assert not bench.errors


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_image_that_failed_in_a_step_without_its_tokens_ends_who_shows_it_later(
    bench: Bench, is_aborted: bool
) -> None:
    """A plan may encode an image for which no token is left in the step; other sequences then expect its rows, too."""
    bench.tower.raises = 66
    bench.add(1, [5, IMAGE, 6], picture(1, b"B"))
    bench.add(2, [5, 6, 7])
    plan = StepPlan(step_id=1, seqs=[step(2, 0, 1)], encode=[(1, 0)])
    assert bench.encoder.encode(plan, bench.rig.batch.seqs, bench.tower) == {}
    bench.planned.add(digest(b"B"))
    shows = 1
    if is_aborted:
        bench.rig.batch.drop([1])
        bench.add(shows := 3, [5, IMAGE, 6], picture(1, b"B"))
    assert bench.embed(step(2, 1, 1), step(shows, 0, 3)) is None
    assert list(bench.errors) == [shows]


def test_an_image_whose_second_encoding_fails_spares_sequences_that_have_computed_its_tokens(bench: Bench) -> None:
    """A sequence that is added later may read blocks of the failed encoding, also under an id that was in use."""
    prompt, bad = [IMAGE, 5, 6, 7, 8, 9], picture(0, b"B")
    bench.add(1, prompt, bad)
    bench.add(2, prompt, bad)
    assert bench.embed(step(1, 0, 2), step(2, 0, 2)) == [66, -1, 66, -1]
    bench.tower.raises = 66
    bench.add(3, prompt, bad)
    assert bench.embed(step(1, 2, 1), step(3, 0, 2), dropped=(digest(b"B"),)) is None
    assert list(bench.errors) == [3]
    bench.rig.batch.drop([2])
    bench.add(2, prompt, bad)
    assert bench.embed(step(1, 3, 1), step(2, 2, 1)) is None
    assert list(bench.errors) == [2]


def test_a_sequence_that_reads_the_blocks_of_a_failed_encoding_while_it_runs_ends(bench: Bench) -> None:
    prompt, bad = [5, 6, IMAGE, 7, 8], picture(2, b"B")
    bench.add(1, prompt, bad)
    bench.add(2, prompt, bad)
    bench.embed(step(1, 0, 1))
    bench.tower.raises = 66
    bench.embed(step(1, 3, 1), step(2, 0, 3))
    assert sorted(bench.errors) == [1, 2]


def test_the_time_of_encoding_does_not_count_as_a_cost_of_steps() -> None:
    """The encoder runs before the timer of the step starts; the recorded calls of the device would show it."""
    rig, seen = Rig(), list[str]()
    rig.runner._images = SimpleNamespace(  # type: ignore[assignment]
        encode=lambda *_: seen.append("encode") or {},
        has_rows=lambda *_: True,
        embed=lambda *_: seen.append("embed"),
        add_costs=lambda costs: costs,
        take_seconds=lambda: 0.0,
    )
    rig.model.tower = object()  # type: ignore[attr-defined]
    rig.device.timer = lambda: seen.append("timer") or type(rig.device).timer(rig.device)  # type: ignore[method-assign]
    rig.runner.run(StepPlan(step_id=1, new_seqs=[new(1, 5, 6)], seqs=[step(1, 0, 2, block_ids=[[0]])]))
    assert seen == ["encode", "timer", "embed"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size is not supported yet"),
        ({"enable_lora": True}, "--enable-lora is not supported yet"),
        ({"runner": "pooling"}, "--runner pooling is not supported yet"),
        ({"model_impl": "transformers"}, "--model-impl transformers is not supported yet"),
        ({"draft": True}, "a draft model in --speculative-config is not supported yet"),
    ],
)
def test_settings_that_do_not_suit_a_tower_are_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    if settings.pop("draft", False):
        settings["speculative_config"] = SpeculativeConfig(num_speculative_tokens=2, method="draft_model", model="m")
    config = EngineConfig(model=str(make_tiny_vision("llava", tmp_path)), **settings)
    with pytest.raises(StartupError, match=named):
        read_checkpoint(config, resolve_files(config))
