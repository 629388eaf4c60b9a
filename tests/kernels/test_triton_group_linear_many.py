"""Products with weights in groups by Triton's kernels, in the interpreter: all kinds, groups, rows and parts."""

import pytest
import torch
from octavo_engine.ops.triton.group_linear import TILES
from octavo_testing.group_cases import KINDS, GroupCase

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rows", [1, 5, 17, 64, 65])
@pytest.mark.parametrize("group", [32, 64, 128, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows_and_parts_equals_the_expanded_weight(kind: str, group: int, rows: int) -> None:
    for parts in (1, 2, 3, 4):
        assert GroupCase.make(kind, rows, group, bias=parts % 2 == 1).error_of_parts(parts) <= 2e-6, parts


def test_the_bits_of_a_row_in_the_largest_tile_depend_on_no_other() -> None:
    tile = TILES[-1]
    case = GroupCase.make("int4", tile.rows, 64, size=128)
    crowded = case.compute(case.x, tile)
    case.x[1:].fill_(float("nan"))
    assert torch.equal(case.compute(case.x, tile)[:1], crowded[:1])
    assert torch.equal(case.compute(case.x[:1], tile), crowded[:1])
