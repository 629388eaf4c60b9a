"""Weights in GGUF's blocks have the bits of bf16 weights of the same values, at every level of this CPU."""

import ctypes

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from octavo_engine.ops import native_blocks, native_linear
from octavo_engine.ops.activation import ACTIVATIONS
from octavo_engine.ops.native_blocks import BLOCK_FORMATS, BlockTensor, BlockWeight, gather_blocks
from octavo_engine.ops.native_library import load_library
from octavo_engine.ops.native_linear import NativeWeight, native_gated, native_weight
from octavo_engine.ops.native_linear import native_linear as multiply
from octavo_testing.kernel_levels import levels_to_test
from torch import Tensor

TESTED = {level.name: level for level in levels_to_test()}
CPU = torch.device("cpu")
FEW = (1, 7, 40)
# out, in, rows; the last one is wider than all slices of inputs
SHAPES = [(97, 64, (1, 2, 6, 7, 16, 17, 33, 64, 256)), (1, 32, FEW), (16, 96, FEW), (33, 576, FEW), (48, 2112, FEW)]


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)


@pytest.fixture(scope="module", params=TESTED, autouse=True)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_library("g++", TESTED[request.param])


@pytest.fixture(autouse=True)
def _level(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> None:
    for module in (native_blocks, native_linear):
        monkeypatch.setattr(module, "native_library", lambda: library)


@pytest.fixture(params=BLOCK_FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random_blocks(name: str, out_features: int, in_features: int) -> BlockTensor:
    """Make blocks of random bytes: all quants, and scales and minima of both signs, zero, subnormal and large."""
    generator = np.random.default_rng(out_features + in_features)
    block_format = BLOCK_FORMATS[name]
    blocks = generator.integers(0, 256, (out_features, in_features // 32, block_format.num_bytes), dtype=np.uint8)
    num_scales = 2 if name == "Q4_1" else 1
    scales = generator.standard_normal((*blocks.shape[:2], num_scales)) * 10.0 ** generator.integers(
        -8, 3, (*blocks.shape[:2], num_scales)
    )
    scales[generator.random(scales.shape) < 0.1] = 0
    blocks[..., : 2 * num_scales] = scales.astype(np.float16).view(np.uint8)
    return BlockTensor(block_format, torch.from_numpy(blocks.reshape(out_features, -1)))


def expanded(tensor: BlockTensor) -> Tensor:
    values = dequantize(tensor.rows.numpy(), GGMLQuantizationType[tensor.format.name])
    return torch.from_numpy(values).bfloat16()


def loaded(tensor: BlockTensor, *, gated: bool = False) -> BlockWeight:
    weight = BlockWeight(tensor.format, *tensor.shape, CPU, gated=gated)
    assert weight.load(0, tensor) is None
    return weight


def dense(tensor: BlockTensor, bias: Tensor | None = None, *, gated: bool = False) -> NativeWeight:
    made = native_weight(expanded(tensor), bias, gated=gated)
    assert made is not None, "these tests need g++"
    return made


def inputs(rows: int, in_features: int) -> Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()


@pytest.mark.parametrize(("out_features", "in_features", "row_counts"), SHAPES)
def test_outputs_equal_those_of_the_expanded_weight(
    threads: int, name: str, out_features: int, in_features: int, row_counts: tuple[int, ...]
) -> None:
    tensor = random_blocks(name, out_features, in_features)
    bias = inputs(1, out_features)[0]
    blocks, plain = loaded(tensor).native(bias), dense(tensor, bias)
    for rows in row_counts:
        x = inputs(rows, in_features)
        assert torch.equal(multiply(x, blocks, torch.float32), multiply(x, plain, torch.float32)), rows
    assert torch.equal(multiply(x, blocks, torch.bfloat16), multiply(x, plain, torch.bfloat16))


@pytest.mark.parametrize("size", [16, 48, 176])
def test_gated_outputs_equal_those_of_the_expanded_weight(threads: int, name: str, size: int) -> None:
    tensor = random_blocks(name, 2 * size, 96)
    blocks, plain = loaded(tensor, gated=True).native(), dense(tensor, gated=True)
    activation = ACTIVATIONS["silu"].native
    assert activation is not None
    for rows in (1, 9, 40):
        x = inputs(rows, 96) * 0.01
        assert torch.equal(native_gated(x, blocks, activation), native_gated(x, plain, activation))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_parts_are_packed_one_by_one(name: str, gated: bool) -> None:
    tensor = random_blocks(name, 96, 64)
    whole, parts = loaded(tensor, gated=gated), BlockWeight(tensor.format, 96, 64, CPU, gated=gated)
    for first, last in ((40, 96), (0, 7), (7, 40)):
        parts.load(first, BlockTensor(tensor.format, tensor.rows[first:last]))
    assert torch.equal(parts.panels, whole.panels)


def test_a_weight_has_the_size_of_its_tensor(name: str) -> None:
    tensor = random_blocks(name, 64, 96)
    assert loaded(tensor).nbytes == tensor.rows.nbytes


@pytest.mark.parametrize("scale", [1.0, 24.0, 0.1])
def test_gathered_rows_are_expanded_and_scaled(threads: int, name: str, scale: float) -> None:
    tensor = random_blocks(name, 97, 160)
    ids = torch.tensor([0, 96, 31, 32, 5, 5, 48, 97, -1])
    rows = gather_blocks(loaded(tensor).native(), ids, scale)
    assert torch.equal(rows[:7], expanded(tensor)[ids[:7]] * scale)
    assert rows[7:].isnan().all()


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01], ids=["inf", "-inf", "nan"])
def test_the_first_row_with_a_scale_that_is_not_finite_is_reported(name: str, bits: int) -> None:
    tensor = random_blocks(name, 40, 64)
    blocks = tensor.rows.view(40, 2, -1)
    for row in (39, 33):
        blocks[row, 1, :2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    assert BlockWeight(tensor.format, 40, 64, CPU).load(0, tensor) == 33


def test_a_minimum_that_is_not_finite_is_reported() -> None:
    tensor = random_blocks("Q4_1", 40, 64)
    tensor.rows.view(40, 2, -1)[12, 0, 2:4] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    assert BlockWeight(tensor.format, 40, 64, CPU).load(0, tensor) == 12
