"""The FP8 kernels, in the interpreter, and torch's product on the CPU, against fp64 over the same rounded operands."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor, expand_groups
from octavo_engine.ops.triton.expert_linear import Tile
from octavo_engine.ops.triton.fp8_linear import TILES, FP8Weight, fp8_linear, prepare_fp8, round_rows, scaled_product
from octavo_testing.group_cases import rounded_by_torch
from octavo_testing.kernel_cases import random
from octavo_testing.triton_device import exact_e4m3
from torch import Tensor

E4M3 = torch.float8_e4m3fn
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def _exact_e4m3() -> Iterator[None]:
    with exact_e4m3():
        yield


def make_weight(out: int, size: int, num_groups: int, seed: int = 1) -> GroupTensor:
    """Return a weight whose scales differ by output, and by group."""
    codes = (100 * random(out, size, seed=seed)).clamp(-448, 448).to(E4M3).view(torch.uint8)
    group_format = GroupFormat(name="FP8", codes="e4m3", group_size=size // num_groups, scale_dtype=torch.float32)
    scales = torch.rand(num_groups, out, generator=torch.Generator().manual_seed(seed)) / 1000 + 1e-4
    return GroupTensor(format=group_format, codes=codes, scales=scales)


def error(got: Tensor, want: Tensor) -> float:
    """Return the largest error, of the largest value."""
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def without_product(weight: GroupTensor, bias: Tensor | None = None, scale: float | None = None) -> FP8Weight:
    """Prepare a weight for the Triton kernel, also where torch could multiply it."""
    codes, scales = weight.codes.view(E4M3), weight.scales
    return FP8Weight(codes=codes, scales=scales, bias=bias, input_scale=scale if len(scales) == 1 else None)


@pytest.mark.parametrize("given", [None, 0.01], ids=["dynamic", "static"])
@pytest.mark.parametrize(("size", "num_groups"), [(96, 1), (256, 2), (33 * 128, 33)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_are_rounded_as_torch_rounds_them(
    size: int, num_groups: int, given: float | None, dtype: torch.dtype
) -> None:
    x = 3 * random(5, size + 3, dtype=dtype)[:, :size]  # of which rows are strided
    x[1] = 0
    x[2] *= 1e4 / x[2].abs().max()
    codes, scales = round_rows(x, num_groups, given)
    values = codes.double().view(5, num_groups, -1) * scales.double().unsqueeze(-1)
    assert torch.equal(values.view(5, size), rounded_by_torch(x, num_groups, given))
    assert not values[1].any()
    if given is not None:
        assert values.abs().max() == 448 * torch.tensor(given).double()


@pytest.mark.parametrize("given", [None, 0.5], ids=["dynamic", "static"])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_value_that_is_no_number_is_nan_alone(bad: float, num_groups: int, given: float | None) -> None:
    weight, x = make_weight(70, 256, num_groups), random(5, 256, dtype=torch.float16)
    prepared = [without_product(weight, scale=given)]
    if num_groups == 1:
        prepared.append(prepare_fp8(weight, None, x.dtype, given))
    for each in prepared:
        clean = fp8_linear(x, each)
        spoilt = x.clone()
        spoilt[3, 17] = bad
        found = fp8_linear(spoilt, each)
        assert found[3].isnan().all()
        others = [0, 1, 2, 4]
        assert torch.equal(found[others], clean[others])


CASES = [
    pytest.param(rows, out, size, num_groups, id=f"{rows} x {out} x {size} of {num_groups}")
    for (rows, out), (size, num_groups) in product([(2, 70), (17, 64), (70, 33)], [(64, 1), (192, 1), (256, 2)])
]


@pytest.mark.parametrize(("rows", "out", "size", "num_groups"), CASES)
def test_products_equal_fp64_over_the_rounded_operands(rows: int, out: int, size: int, num_groups: int) -> None:
    weight, x = make_weight(out, size, num_groups), random(rows, size, dtype=torch.float16)
    x[0], x[-1] = 0, x[-1] * 1e4 / x[-1].abs().max()
    bias = random(out, dtype=x.dtype, seed=5) if out == 33 else None
    want = rounded_by_torch(x, num_groups) @ expand_groups(weight, torch.float64).t()
    want = want if bias is None else want + bias.double()
    prepared = prepare_fp8(weight, bias, x.dtype, None)
    assert prepared.has_product == (num_groups == 1), "torch's product on the CPU has no groups"
    for each in (prepared, without_product(weight, bias)):
        found = fp8_linear(x, each)
        assert found.dtype == x.dtype
        for row in range(rows):
            if want[row].any():
                assert error(found[row], want[row]) <= TOLERANCE
        assert torch.equal(found[0], torch.zeros(out, dtype=x.dtype) if bias is None else bias)


@pytest.mark.parametrize("scale", [0.004, 4.0])
def test_a_static_scale_saturates_and_rounds(scale: float) -> None:
    weight, x = make_weight(64, 256, 1), random(3, 256)
    want = rounded_by_torch(x, 1, scale) @ expand_groups(weight, torch.float64).t()
    for each in (prepare_fp8(weight, None, x.dtype, scale), without_product(weight, scale=scale)):
        assert error(fp8_linear(x, each), want) <= TOLERANCE


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_the_bits_of_a_row_depend_neither_on_others_nor_on_the_tile(tile: Tile, num_groups: int) -> None:
    weight, x = make_weight(70, 256, num_groups), random(19, 256, dtype=torch.float16)
    fp8 = weight.codes.view(E4M3)

    def multiply(x: Tensor, tile: Tile) -> Tensor:
        return scaled_product(*round_rows(x, num_groups), fp8, weight.scales, None, torch.float32, tile)

    among = multiply(x, tile)
    for row in (0, 18):
        assert torch.equal(multiply(x[row : row + 1], TILES[0]), among[row : row + 1])
    others = torch.cat((random(18, 256, seed=7).half() * 100, x[18:]))
    assert torch.equal(multiply(others, tile)[18], among[18])


def test_a_product_that_torch_lacks_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = make_weight(64, 128, 1), random(3, 128)
    want = fp8_linear(x, prepare_fp8(weight, None, x.dtype, None))

    def refuse(*arguments: object, **options: object) -> Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    prepared = prepare_fp8(weight, None, x.dtype, None)
    assert not prepared.has_product
    assert error(fp8_linear(x, prepared), want.double()) <= TOLERANCE
    monkeypatch.delattr(torch, "_scaled_mm")
    assert not prepare_fp8(weight, None, x.dtype, None).has_product
