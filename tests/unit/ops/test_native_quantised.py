"""Products of weights in GGUF's blocks have the bits of a reference in torch, at every level of this CPU.

The fast tests have the best level and tiles in plain C++.
"""

import ctypes
import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from octavo_engine.ops import native_linear as native_linear_module
from octavo_engine.ops import native_quantised as native_quantised_module
from octavo_engine.ops.activation import ACTIVATIONS, act_mul
from octavo_engine.ops.cpu_level import Level
from octavo_engine.ops.gather import TablePart
from octavo_engine.ops.native_linear import native_gated
from octavo_engine.ops.native_linear import native_linear as multiply
from octavo_engine.ops.native_quantised import (
    QUANTISED_FORMATS,
    QuantisedTensor,
    QuantisedWeight,
    gather_blocks,
    native_quantised,
)
from octavo_testing.block_products import reference
from octavo_testing.kernel_levels import has_fused_products
from torch import Tensor

CPU = torch.device("cpu")
MOST_ROWS = 70
# blocks of 32 and of 256: out, in
SHAPES = {32: [(97, 64), (1, 32), (16, 96), (33, 2112)], 256: [(97, 256), (1, 512), (48, 2304)]}
CASES = [
    (name, *shape) for name, block_format in QUANTISED_FORMATS.items() for shape in SHAPES[block_format.num_values]
]
LARGEST = torch.finfo(torch.bfloat16).max
DIGESTS: dict[str, str] = json.loads(Path(__file__).with_name("block_product_digests.json").read_text())
# where the fp16 numbers of a block are that is not a scale at its beginning
NUMBERS = {"Q6_K": [208], **{name: [0, 2] for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}}


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


def inputs(rows: int, in_features: int) -> Tensor:
    return torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).bfloat16()


@functools.cache
def sums(name: str, out_features: int, in_features: int, *, is_fused: bool) -> Tensor:
    """Return the reference of `random_blocks` for as many rows as there are."""
    return reference(inputs(MOST_ROWS, in_features), random_blocks(name, out_features, in_features), is_fused=is_fused)


def assert_equal_bits(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(*(x.masked_fill(x.isnan(), 0).view(torch.int32) for x in (found, expected)))


@pytest.mark.parametrize(("name", "out_features", "in_features"), CASES)
def test_outputs_equal_the_reference(level: Level, name: str, out_features: int, in_features: int) -> None:
    bias, x = inputs(1, out_features)[0], inputs(MOST_ROWS, in_features)
    blocks = loaded(random_blocks(name, out_features, in_features))
    plain, biased = native_quantised([blocks]), native_quantised([blocks], bias)
    expected = sums(name, out_features, in_features, is_fused=has_fused_products(level))
    for rows in range(1, MOST_ROWS + 1):
        torch.set_num_threads({2: 2, 33: 3}.get(rows, 1))
        assert_equal_bits(multiply(x[:rows], plain, torch.float32), expected[:rows])
    assert_equal_bits(multiply(x, biased, torch.float32), expected + bias.float())
    assert torch.equal(multiply(x, biased, torch.bfloat16), (expected + bias.float()).bfloat16())


@pytest.mark.parametrize("size", [16, 48, 176])
def test_gated_outputs_equal_the_reference(level: Level, name: str, size: int) -> None:
    in_features = 3 * QUANTISED_FORMATS[name].num_values
    tensor, activation = random_blocks(name, 2 * size, in_features), ACTIVATIONS["silu"]
    blocks = native_quantised([loaded(tensor, gated=True)])
    assert activation.native is not None
    x = inputs(40, in_features) * 0.001
    expected = act_mul(reference(x, tensor, is_fused=has_fused_products(level)).bfloat16(), activation)
    for threads, rows in ((1, 40), (2, 40), (3, 9), (1, 1)):
        torch.set_num_threads(threads)
        assert torch.equal(native_gated(x[:rows], blocks, activation.native), expected[:rows])


def test_a_row_has_the_same_bits_in_every_batch(name: str) -> None:
    blocks, x = native_quantised([loaded(random_blocks(name, 97, 512))]), inputs(1024, 512)
    together = multiply(x, blocks, torch.float32)
    for rows in (1, 2, 7, 64):
        for part in (slice(rows), slice(500, 500 + rows), slice(-rows, None)):
            assert_equal_bits(multiply(x[part], blocks, torch.float32), together[part])
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_equal_bits(multiply(x, blocks, torch.float32), together)
        assert_equal_bits(multiply(x[-1:], blocks, torch.float32), together[-1:])


def test_levels_with_fused_products_have_the_bits_of_the_golden_file(level: Level, name: str) -> None:
    if not has_fused_products(level):
        pytest.skip("this level rounds products")
    block_format = QUANTISED_FORMATS[name]
    num_blocks = 2048 // block_format.num_values
    random = hashlib.shake_256(name.encode()).digest(64 * num_blocks * block_format.num_bytes + 20 * 2048)
    values = np.frombuffer(random, np.uint8)
    blocks = values[20 * 2048 :].reshape(64, num_blocks, -1).copy()
    for at in NUMBERS.get(name, [0]):
        numbers = (np.arange(64 * num_blocks).reshape(64, -1) * 37 % 201 - 100 + at) / 1000
        blocks[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    tensor = QuantisedTensor(block_format, torch.from_numpy(blocks.reshape(64, -1)))
    x = torch.from_numpy(values[: 20 * 2048].astype(np.float32) - 128).view(20, 2048).bfloat16()
    found = multiply(x, native_quantised([loaded(tensor)]), torch.float32)
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest() == DIGESTS[name]


def with_numbers(tensor: QuantisedTensor, numbers: list[float]) -> QuantisedTensor:
    """Replace scales and minima by these fp16 numbers in turn."""
    blocks = tensor.rows.numpy().reshape(len(tensor.rows), -1, tensor.format.num_bytes)
    for at in NUMBERS.get(tensor.format.name, [0]):
        values = np.resize(np.array(numbers, np.float16), blocks.shape[:2])
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    return tensor


def test_extreme_scales_equal_the_reference(level: Level, name: str) -> None:
    numbers = [0.0, -0.0, 2**-24, -(2**-24), 65504.0, -65504.0, 1.5]
    tensor, x = with_numbers(random_blocks(name, 49, 2304), numbers), inputs(9, 2304)
    found = multiply(x, native_quantised([loaded(tensor)]), torch.float32)
    assert found.isfinite().all()
    assert_equal_bits(found, reference(x, tensor, is_fused=has_fused_products(level)))


@pytest.mark.parametrize("number", [2**-24, 65504.0], ids=["small-weights", "large-weights"])
def test_extreme_inputs_equal_the_reference(level: Level, name: str, number: float) -> None:
    tensor = with_numbers(random_blocks(name, 49, 512), [number, -number])
    x = torch.stack([inputs(1, 512)[0]] * 15)
    x[1], x[2], x[3], x[4, ::2], x[5] = LARGEST, -LARGEST, 0, -LARGEST, 2.0**-100
    x[6], x[7], x[8, 40], x[9, 40], x[10] = 2.0**-101, 2.0**-133, 1e4, -1e4, -x[10] * 2.0**-99
    x[11, 3], x[12, 511], x[13, 80], x[14, 32:64] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[11, 9] = LARGEST
    found = multiply(x, native_quantised([loaded(tensor)]), torch.float32)
    assert_equal_bits(found, reference(x, tensor, is_fused=has_fused_products(level)))
    assert found[11:].isnan().all()
    if number < 1:  # no product overflows
        assert found[:11].isfinite().all()
    assert found[[3, 6, 7]].count_nonzero() == 0


def test_views_and_no_rows_are_supported(name: str) -> None:
    blocks, wide = native_quantised([loaded(random_blocks(name, 33, 256))]), inputs(7, 600)
    for x in (wide[:, 9:265], wide[::2, :256], inputs(256, 5).t()):
        assert_equal_bits(multiply(x, blocks, torch.float32), multiply(x.contiguous(), blocks, torch.float32))
    assert multiply(wide[:6, :256].view(2, 3, 256), blocks, torch.bfloat16).shape == (2, 3, 33)
    assert multiply(wide[:0, :256], blocks, torch.float32).shape == (0, 33)


def test_torch_multiplies_on_the_same_threads(name: str) -> None:
    """oneDNN may use AMX with its own tile configuration, before and after ours."""
    blocks, dense = native_quantised([loaded(random_blocks(name, 33, 256))]), inputs(64, 96)
    wide, narrow = inputs(50, 256), inputs(50, 96)
    torch.set_num_threads(2)
    want = multiply(wide, blocks, torch.float32), torch.nn.functional.linear(narrow, dense)
    for _ in range(3):
        assert_equal_bits(multiply(wide, blocks, torch.float32), want[0])
        assert torch.equal(torch.nn.functional.linear(narrow, dense), want[1])


def test_inputs_that_are_no_whole_blocks_are_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="whole blocks"):
        QuantisedWeight(QUANTISED_FORMATS[name], 32, QUANTISED_FORMATS[name].num_values + 16, CPU)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_parts_are_packed_one_by_one(name: str, gated: bool) -> None:
    tensor = random_blocks(name, 96, 256)
    whole, parts = loaded(tensor, gated=gated), QuantisedWeight(tensor.format, 96, 256, CPU, gated=gated)
    for first, last in ((40, 96), (0, 7), (7, 40)):
        parts.load(first, QuantisedTensor(tensor.format, tensor.rows[first:last]))
    assert torch.equal(parts.panels.memory, whole.panels.memory)


@pytest.mark.parametrize("result", [torch.float32, torch.bfloat16])
def test_parts_of_several_formats_are_beside_each_other(level: Level, result: torch.dtype) -> None:
    sizes = {"Q4_K": 97, "Q6_K": 16, "Q5_0": 33}
    tensors = [random_blocks(name, out, 256) for name, out in sizes.items()]
    bias, x = inputs(1, sum(sizes.values()))[0], inputs(40, 256)
    parts = native_quantised([loaded(tensor) for tensor in tensors], bias)
    expected = torch.cat([reference(x, tensor, is_fused=has_fused_products(level)) for tensor in tensors], -1)
    for threads, rows in ((1, 40), (2, 40), (3, 7), (1, 1)):
        torch.set_num_threads(threads)
        assert torch.equal(multiply(x[:rows], parts, result), (expected[:rows] + bias.float()).to(result)), rows


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
