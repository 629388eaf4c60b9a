"""Weights in GGUF's blocks have the bits of bf16 weights of the same values, at every level of this CPU."""

import ctypes
from itertools import product

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from octavo_engine.ops import native_linear as native_linear_module
from octavo_engine.ops import native_quantised as native_quantised_module
from octavo_engine.ops.activation import ACTIVATIONS
from octavo_engine.ops.gather import TablePart
from octavo_engine.ops.native_library import load_library
from octavo_engine.ops.native_linear import NativeWeight, native_gated, native_weight
from octavo_engine.ops.native_linear import native_linear as multiply
from octavo_engine.ops.native_quantised import (
    QUANTISED_FORMATS,
    QuantisedTensor,
    QuantisedWeight,
    gather_blocks,
    native_quantised,
)
from octavo_testing.kernel_levels import levels_to_test
from torch import Tensor

TESTED = {level.name: level for level in levels_to_test()}
CPU = torch.device("cpu")
FEW, MANY = (1, 7, 40), (1, 2, 6, 7, 16, 17, 33, 64, 256)
# blocks of 32 and of 256: out, in, rows; the last one is wider than all slices of inputs
SHAPES = {
    32: [(97, 64, MANY), (1, 32, FEW), (16, 96, FEW), (33, 2112, FEW)],
    256: [(97, 256, MANY), (1, 512, FEW), (48, 2304, FEW)],
}
CASES = [
    (name, *shape) for name, block_format in QUANTISED_FORMATS.items() for shape in SHAPES[block_format.num_values]
]
# where the fp16 numbers of a block are that is not a scale at its beginning
NUMBERS = {"Q6_K": [208], **{name: [0, 2] for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}}


@pytest.fixture(scope="module", params=TESTED, autouse=True)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_library("g++", TESTED[request.param])


@pytest.fixture(autouse=True)
def _level(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> None:
    for module in (native_quantised_module, native_linear_module):
        monkeypatch.setattr(module, "native_library", lambda: library)


@pytest.fixture(params=QUANTISED_FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random_blocks(name: str, out_features: int, in_features: int) -> QuantisedTensor:
    """Make blocks of random bytes: all quants, and scales and minima of both signs, zero, subnormal and large."""
    generator = np.random.default_rng(out_features + in_features)
    block_format = QUANTISED_FORMATS[name]
    shape = (out_features, in_features // block_format.num_values)
    blocks = generator.integers(0, 256, (*shape, block_format.num_bytes), dtype=np.uint8)
    for at in NUMBERS.get(name, [0]):
        numbers = generator.standard_normal(shape) * 10.0 ** generator.integers(-8, 3, shape)
        numbers[generator.random(shape) < 0.1] = 0
        blocks[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return QuantisedTensor(block_format, torch.from_numpy(blocks.reshape(out_features, -1)))


def expanded(tensor: QuantisedTensor) -> Tensor:
    values = dequantize(tensor.rows.numpy(), GGMLQuantizationType[tensor.format.name])
    return torch.from_numpy(values).bfloat16()


def loaded(tensor: QuantisedTensor, *, gated: bool = False) -> QuantisedWeight:
    weight = QuantisedWeight(tensor.format, *tensor.shape, CPU, gated=gated)
    assert weight.load(0, tensor) is None
    return weight


def dense(tensor: QuantisedTensor, bias: Tensor | None = None, *, gated: bool = False) -> NativeWeight:
    made = native_weight(expanded(tensor), bias, gated=gated)
    assert made is not None, "these tests need g++"
    return made


def inputs(rows: int, in_features: int) -> Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize(("name", "out_features", "in_features", "row_counts"), CASES)
def test_outputs_equal_those_of_the_expanded_weight(
    name: str, out_features: int, in_features: int, row_counts: tuple[int, ...]
) -> None:
    tensor = random_blocks(name, out_features, in_features)
    bias = inputs(1, out_features)[0]
    blocks, plain = native_quantised([loaded(tensor)], bias), dense(tensor, bias)
    for threads, rows in product((1, 2), row_counts):
        torch.set_num_threads(threads)
        x = inputs(rows, in_features)
        assert torch.equal(multiply(x, blocks, torch.float32), multiply(x, plain, torch.float32)), (threads, rows)
    assert torch.equal(multiply(x, blocks, torch.bfloat16), multiply(x, plain, torch.bfloat16))


@pytest.mark.parametrize("size", [16, 48, 176])
def test_gated_outputs_equal_those_of_the_expanded_weight(name: str, size: int) -> None:
    in_features = 3 * QUANTISED_FORMATS[name].num_values
    tensor = random_blocks(name, 2 * size, in_features)
    blocks, plain = native_quantised([loaded(tensor, gated=True)]), dense(tensor, gated=True)
    activation = ACTIVATIONS["silu"].native
    assert activation is not None
    for threads, rows in product((1, 2), (1, 9, 40)):
        torch.set_num_threads(threads)
        x = inputs(rows, in_features) * 0.001
        assert torch.equal(native_gated(x, blocks, activation), native_gated(x, plain, activation))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_parts_are_packed_one_by_one(name: str, gated: bool) -> None:
    tensor = random_blocks(name, 96, 256)
    whole, parts = loaded(tensor, gated=gated), QuantisedWeight(tensor.format, 96, 256, CPU, gated=gated)
    for first, last in ((40, 96), (0, 7), (7, 40)):
        parts.load(first, QuantisedTensor(tensor.format, tensor.rows[first:last]))
    assert torch.equal(parts.panels.memory, whole.panels.memory)


@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
def test_parts_of_several_formats_are_beside_each_other(result: torch.dtype) -> None:
    sizes = {"Q4_K": 97, "Q6_K": 16, "Q5_0": 33}
    tensors = [random_blocks(name, out, 256) for name, out in sizes.items()]
    bias = inputs(1, sum(sizes.values()))[0]
    parts = native_quantised([loaded(tensor) for tensor in tensors], bias)
    plain = native_weight(torch.cat([expanded(tensor) for tensor in tensors]), bias)
    assert plain is not None
    for threads, rows in product((1, 2), FEW):
        torch.set_num_threads(threads)
        x = inputs(rows, 256)
        assert torch.equal(multiply(x, parts, result), multiply(x, plain, result)), rows


def test_a_weight_is_at_most_three_percent_larger_than_its_tensor(name: str) -> None:
    tensor = random_blocks(name, 64, 256)
    assert 1 <= loaded(tensor).nbytes / tensor.rows.nbytes < 1.03


@pytest.mark.parametrize("scale", [1.0, 24.0, 0.1])
def test_gathered_rows_are_expanded_and_scaled(name: str, scale: float) -> None:
    tensor = random_blocks(name, 97, 5 * QUANTISED_FORMATS[name].num_values)
    ids = torch.tensor([0, 96, 31, 32, 5, 5, 48, 97, -1])
    rows = gather_blocks(native_quantised([loaded(tensor)]), ids, scale)
    assert torch.equal(rows[:7], expanded(tensor)[ids[:7]] * scale)
    assert rows[7:].isnan().all()


def test_rows_of_another_part_of_a_table_are_zero(name: str) -> None:
    """The weight has rows 64 to 96 of 97."""
    tensor = random_blocks(name, 33, QUANTISED_FORMATS[name].num_values)
    rows = gather_blocks(
        native_quantised([loaded(tensor)]), torch.tensor([64, 96, 63, 0, 97, -1]), 1.0, TablePart(64, 97)
    )
    assert torch.equal(rows[:2], expanded(tensor)[[0, 32]])
    assert rows[2:4].count_nonzero() == 0
    assert rows[4:].isnan().all()


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01], ids=["inf", "-inf", "nan"])
def test_the_first_row_with_a_number_that_is_not_finite_is_reported(name: str, bits: int) -> None:
    for at in NUMBERS.get(name, [0]):
        tensor = random_blocks(name, 40, 512)
        blocks = tensor.rows.view(40, -1, tensor.format.num_bytes)
        for row in (39, 33):
            blocks[row, -1, at : at + 2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
        assert QuantisedWeight(tensor.format, 40, 512, CPU).load(0, tensor) == 33
