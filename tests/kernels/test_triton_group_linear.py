"""Products with weights in groups by Triton's kernels, in the interpreter, against fp64 over the expanded weight."""

from dataclasses import replace

import pytest
import torch
from octavo_engine.ops.group_tensor import expand_groups
from octavo_engine.ops.triton import group_linear as kernels
from octavo_engine.ops.triton.expert_linear import Tile
from octavo_engine.ops.triton.group_linear import MAX_ROWS, TILES, expand, group_linear, num_parts
from octavo_testing.group_cases import KINDS, GroupCase, random_group_tensor
from octavo_testing.kernel_cases import random

HALF, FP32 = torch.float16, torch.float32


@pytest.mark.parametrize("group", [32, 128, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_equals_that_of_the_expanded_weight(kind: str, group: int) -> None:
    assert GroupCase.make(kind, 5, group, bias=True).error_of_parts(3) <= 2e-6


@pytest.mark.parametrize(("group", "size"), [(96, 288), (32, 96), (64, 192), (160, 320)])
def test_groups_and_inputs_need_only_be_multiples_of_32(group: int, size: int) -> None:
    for kind in ("int4 with zeros", "int8"):
        assert GroupCase.make(kind, 3, group, size=size).error_of_parts(2) <= 2e-6


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, FP32], ids=str)
@pytest.mark.parametrize("kind", ["int4 with minimums", "e4m3"])
def test_scales_have_the_type_of_the_checkpoint(kind: str, scale_dtype: torch.dtype) -> None:
    weight = random_group_tensor(kind, 30, 128, 64, scale_dtype=scale_dtype)
    case = GroupCase(random(2, 128, dtype=HALF), weight, None)
    assert case.error(group_linear(case.x, weight, out_dtype=FP32)) <= 2e-6


def test_rows_may_be_strided_and_in_the_order_of_the_weight() -> None:
    weight = random_group_tensor("int4", 40, 128, 32, order=True)
    assert weight.order is not None
    wide = random(6, 300, dtype=HALF)
    x = wide[:, :128].index_select(1, weight.order)
    assert GroupCase(x, weight, None).error(group_linear(x, weight, out_dtype=FP32)) <= 2e-6
    strided = wide[::2, 7:135]
    assert GroupCase(strided, weight, None).error(group_linear(strided, weight, out_dtype=FP32)) <= 2e-6


def test_an_output_has_the_type_of_the_rows() -> None:
    case = GroupCase.make("int4", 4, 64, bias=True)
    out = group_linear(case.x, case.weight, case.bias)
    assert out.dtype == HALF
    assert torch.equal(out, group_linear(case.x, case.weight, case.bias, out_dtype=FP32).half())
    assert group_linear(case.x[:0], case.weight, case.bias).shape == (0, 67)


@pytest.mark.parametrize("tile", TILES[:2], ids=["16 rows", "64 rows"])
def test_the_bits_of_a_row_depend_on_no_other(tile: Tile) -> None:
    case = GroupCase.make("int4 with zeros", tile.rows, 64, size=256)
    crowded, last = case.compute(case.x, tile), tile.rows - 1
    assert torch.equal(case.compute(case.x[last:], tile), crowded[last:])
    assert torch.equal(case.compute(case.x[: last // 2], tile), crowded[: last // 2])
    assert torch.equal(case.compute(torch.cat((case.x, case.x)), tile)[tile.rows :], crowded)
    case.x[:last].fill_(float("nan"))
    assert torch.equal(case.compute(case.x, tile)[last:], crowded[last:])


def test_a_rank_without_outputs_has_an_empty_product() -> None:
    """A small vocabulary is divided in whole panels: some ranks have none of it."""
    weight = random_group_tensor("int4", 1, 1024, 128)
    none = replace(weight, codes=weight.codes[:0], scales=weight.scales[:, :0])
    kernels.compile_tiles(none, None, HALF, FP32)
    assert group_linear(random(2, 1024, dtype=HALF), none, out_dtype=FP32).shape == (2, 0)


def test_parts_follow_from_the_tile_and_the_shape_of_the_weight() -> None:
    """They are at least four steps each; many outputs need no parts."""
    weight = random_group_tensor("int4", 1, 4096, 128)
    sizes = {128: (8, 8, 8), 6144: (5, 5, 5), 14336: (2, 2, 2), 32768: (1, 1, 1)}
    for out, parts in sizes.items():
        part = replace(weight, codes=weight.codes.expand(out, -1), scales=weight.scales.expand(-1, out))
        assert tuple(num_parts(part, tile) for tile in TILES) == parts, out
    assert [kernels.choose_tile(rows).rows for rows in (1, 16, 17, 64, 65, 256)] == [16, 16, 64, 64, 128, 128]


@pytest.mark.parametrize("group", [32, 128, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_an_expansion_has_the_bits_of_the_reference(kind: str, group: int) -> None:
    weight = random_group_tensor(kind, 37, 512, group)
    assert torch.equal(expand(weight, HALF), expand_groups(weight, HALF))


def test_all_finite_e4m3_codes_are_exact() -> None:
    weight = random_group_tensor("e4m3", 1, 256, 256)
    weight.codes.copy_(torch.arange(256, dtype=torch.uint8)[None])
    weight.scales.fill_(1.0)
    finite = weight.codes & 127 != 127
    assert torch.equal(expand(weight, HALF)[finite], weight.codes.view(torch.float8_e4m3fn).half()[finite])


def test_many_rows_use_the_expanded_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GroupCase.make("int4", MAX_ROWS + 1, 64, out=40, size=64, bias=True)
    wide = group_linear(case.x, case.weight, case.bias, out_dtype=FP32)
    assert case.error(wide) <= 2e-6, "sums of fp32 outputs are not rounded"
    monkeypatch.setattr(kernels, "multiply", None)
    assert case.error(group_linear(case.x, case.weight, case.bias)) <= 1e-3


def test_fp32_outputs_are_compiled_without_an_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanding a logits head would take gigabytes."""
    case = GroupCase.make("int4", 1, 64, out=40, size=64)
    monkeypatch.setattr(kernels, "expand", None)
    kernels.compile_tiles(case.weight, None, HALF, FP32)
    with pytest.raises(TypeError):
        kernels.compile_tiles(case.weight, None, HALF, HALF)
