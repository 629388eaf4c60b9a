"""The Triton kernels of experts, in the interpreter, against torch in fp64."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from octavo_engine.layers.moe import Experts
from octavo_engine.models.registry import build_model
from octavo_engine.ops import triton_devices
from octavo_engine.ops.activation import ACTIVATIONS, act_mul
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.triton.grouped_linear import (
    TILES,
    Tile,
    add_experts,
    choose_tile,
    grouped_linear,
    sort_rows,
)
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from octavo_testing.kernel_cases import random
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import BLOCK, FEEDS, expected_logits, max_distance
from octavo_testing.tiny_models import LENGTH, make_tiny
from octavo_testing.triton_device import triton_kernels
from torch import Tensor

SILU = ACTIVATIONS["silu"]
TILE_PARAMS = [
    pytest.param(tile, id=f"{tile.rows} rows", marks=[pytest.mark.slow] if tile.rows == 128 else []) for tile in TILES
]


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_devices, "DEVICES", {"cpu"})


@dataclass(frozen=True, slots=True)
class Case:
    """Rows with their experts, and the weights of these."""

    x: Tensor
    numbers: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    start: Tensor

    @staticmethod
    def make(
        rows: int, top_k: int, size: int = 32, inner: int = 24, experts: int = 8, busy: list[int] | None = None
    ) -> "Case":
        """Choose `top_k` of the `busy` experts for each row, by default of all."""
        scores = random(rows, experts).softmax(-1)
        if busy is not None:
            scores[:, [i for i in range(experts) if i not in busy]] = 0.0
        weights, numbers = scores.topk(top_k)
        gate_up, down = random(experts, 2 * inner, size, seed=1), random(experts, size, inner, seed=2)
        return Case(random(rows, size, seed=3), numbers, weights, gate_up, down, random(rows, size, seed=4))

    def compute(self, tile: Tile, rows: slice = slice(None)) -> Tensor:
        numbers, weights = self.numbers[rows], self.weights[rows]
        ids = torch.arange(len(self.down) + 1)
        order = sort_rows(numbers, ids, tile)
        inner = act_mul(grouped_linear(self.x[rows], self.gate_up, order, is_sorted=False), SILU)
        return add_experts(grouped_linear(inner, self.down, order, is_sorted=True), numbers, weights, self.start[rows])

    def reference(self) -> Tensor:
        out = self.start.double()
        for row, (numbers, weights) in enumerate(zip(self.numbers.tolist(), self.weights.double(), strict=True)):
            for number, weight in zip(numbers, weights, strict=True):
                gate, up = (self.gate_up[number].double() @ self.x[row].double()).chunk(2)
                out[row] += weight * (self.down[number].double() @ (torch.nn.functional.silu(gate) * up))
        return out

    def error(self, tile: Tile) -> float:
        """Return the largest error, of the largest value."""
        want = self.reference()
        return ((self.compute(tile) - want).abs().max() / want.abs().max()).item()


CASES = {
    "one row": Case.make(1, 2),
    "17 rows, top 1": Case.make(17, 1),
    "21 rows, top 3": Case.make(21, 3, experts=4),
    "all rows at one expert": Case.make(18, 1, busy=[5]),
    "the last expert and the first": Case.make(9, 2, busy=[0, 7]),
    "odd sizes": Case.make(5, 2, size=33, inner=19, experts=3),
    "several tiles of columns": Case.make(3, 2, size=150, inner=75, experts=2),
}


@pytest.mark.parametrize("tile", TILE_PARAMS)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_experts_equal_the_reference(case: Case, tile: Tile) -> None:
    assert case.error(tile) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rows", range(1, 38))
def test_experts_of_any_number_of_rows_equal_the_reference(rows: int) -> None:
    case = Case.make(rows, 1 + rows % 8, experts=9)
    assert max(map(case.error, TILES)) <= 1e-5


@pytest.mark.parametrize("tile", TILE_PARAMS)
def test_the_bits_of_a_row_do_not_depend_on_others(tile: Tile) -> None:
    case = Case.make(10, 2, experts=3)
    crowded = case.compute(tile)
    for row in (0, 9):
        assert torch.equal(case.compute(tile, slice(row, row + 1)), crowded[row : row + 1])
    case.x[5:].fill_(float("nan"))
    assert torch.equal(case.compute(tile)[:5], crowded[:5])


def test_a_row_may_name_its_experts_in_any_order() -> None:
    case = Case.make(4, 3)
    turned = Case(case.x, case.numbers.flip(1), case.weights.flip(1), case.gate_up, case.down, case.start)
    assert torch.equal(turned.compute(TILES[0]), case.compute(TILES[0]))


def test_the_tile_follows_from_the_number_of_rows() -> None:
    sizes = [choose_tile(rows * 8, 128).rows for rows in (1, 64, 256, 257, 1024, 1025, 8192)]
    assert sizes == [16, 16, 16, 64, 64, 128, 128]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    files, (tokens, expected) = resolve_model(str(folder)), expected_logits(folder)
    with triton_kernels():
        model = build_model(load_model_config(files), dtype=torch.float32, device="cpu", max_model_len=LENGTH)
        model.load_weights(iter_weights(files))
        model.finish_loading()
        assert all(each.stacks for each in model.modules() if isinstance(each, Experts))
        backend = CudaBackend(model.kv_specs(), BLOCK, torch.float32, "cpu", num_programs=5)
        driver = PagedDriver(model, block_size=BLOCK, backend=backend)
        assert max_distance(driver, tokens, expected, FEEDS["chunks_at_block_edges"]) <= 1e-4
