"""The Triton kernels of experts, in the interpreter, against torch in fp64."""

import pytest
import torch
from octavo_engine.ops import triton_devices
from octavo_engine.ops.triton.expert_linear import TILES, Tile, choose_tile
from octavo_testing.expert_cases import ExpertCase

TILE_PARAMS = [
    pytest.param(tile, id=f"{tile.rows} rows", marks=[pytest.mark.slow] if tile.rows == 128 else []) for tile in TILES
]


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_devices, "DEVICES", {"cpu"})


CASES = {
    "one row": ExpertCase.make(1, 2),
    "17 rows, top 1": ExpertCase.make(17, 1),
    "21 rows, top 3": ExpertCase.make(21, 3, experts=4),
    "all rows at one expert": ExpertCase.make(18, 1, busy=[5]),
    "the last expert and the first": ExpertCase.make(9, 2, busy=[0, 7]),
    "odd sizes": ExpertCase.make(5, 2, size=33, inner=19, experts=3),
    "several tiles of columns": ExpertCase.make(3, 2, size=150, inner=75, experts=2),
}


@pytest.mark.parametrize("tile", TILE_PARAMS)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_experts_equal_the_reference(case: ExpertCase, tile: Tile) -> None:
    assert case.error(tile) <= 1e-5


@pytest.mark.parametrize("tile", TILE_PARAMS)
def test_the_bits_of_a_row_do_not_depend_on_others(tile: Tile) -> None:
    case = ExpertCase.make(10, 2, experts=3)
    crowded = case.compute(tile)
    for row in (0, 9):
        assert torch.equal(case.compute(tile, slice(row, row + 1)), crowded[row : row + 1])
    case.x[5:].fill_(float("nan"))
    assert torch.equal(case.compute(tile)[:5], crowded[:5])


def test_a_row_may_name_its_experts_in_any_order() -> None:
    case = ExpertCase.make(4, 3)
    turned = ExpertCase(case.x, case.numbers.flip(1), case.weights.flip(1), case.gate_up, case.down, case.start)
    assert torch.equal(turned.compute(TILES[0]), case.compute(TILES[0]))


def test_the_tile_follows_from_the_number_of_rows() -> None:
    sizes = [choose_tile(rows * 8, 128).rows for rows in (1, 64, 256, 257, 1024, 1025, 8192)]
    assert sizes == [16, 16, 16, 64, 64, 128, 128]
