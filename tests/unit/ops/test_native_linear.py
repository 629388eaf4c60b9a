"""Our bf16 linear against fp64, on ragged sizes. A row's bits depend neither on other rows nor on threads."""

import ctypes
import platform

import pytest
import torch
from octavo_engine.ops import native_library as library_module
from octavo_engine.ops import native_linear as module
from octavo_engine.ops.activation import ACTIVATIONS, act_mul
from octavo_engine.ops.native_library import load_library
from octavo_engine.ops.native_linear import NativeWeight, native_gated, native_linear, native_weight, packed_blocks
from octavo_engine.ops.packed_linear import gated_linear, pack, packed_linear
from torch import Tensor

SHAPES = [(64, 32), (97, 35), (1, 1), (16, 2), (33, 576), (130, 63), (960, 576)]  # out, in


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def native(weight: Tensor, bias: Tensor | None = None) -> NativeWeight:
    made = native_weight(weight, bias)
    assert made is not None, "these tests need g++"
    return made


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)


NARROWER = {"avx2": ("-mavx2", "-mfma"), "plain": ()}


@pytest.fixture(scope="module")
def narrower(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """The kernels compiled for CPUs with narrower vectors."""
    if platform.machine() != "x86_64":
        pytest.skip("flags of x86")
    libraries = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name, flags in NARROWER.items():
            patch.setattr(library_module, "_THIS_MACHINE", flags)
            libraries[name] = load_library("g++")
    return libraries


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["to-bf16", "to-fp32"])
def test_outputs_equal_fp64(threads: int, shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    compare(shape, bias, dtype)


@pytest.mark.parametrize("machine", NARROWER)
@pytest.mark.parametrize("shape", [(97, 35), (130, 62)], ids=str)
def test_kernels_for_narrower_vectors_equal_fp64(
    narrower: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch, machine: str, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(module, "native_library", lambda: narrower[machine])
    compare(shape, True, torch.bfloat16)
    compare(shape, True, torch.float32)


def compare(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    weight = random(*shape, seed=0, scale=shape[1] ** -0.5)
    b = random(shape[0], seed=1) if bias else None
    made = native(weight, b)
    for rows in (1, 2, 5, 6, 7, 12, 33):
        x = random(rows, shape[1], seed=2)
        want = x.double() @ weight.double().T + (0 if b is None else b.double())
        got = native_linear(x, made, dtype)
        assert got.dtype == dtype
        rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=rtol)


@pytest.mark.parametrize("size", [16, 48, 64, 80, 1536])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gated_outputs_have_the_bits_of_two_separate_steps(threads: int, size: int, name: str) -> None:
    """So a step may use either way, for any number of rows."""
    made = native(random(2 * size, 70, seed=0, scale=0.3), random(2 * size, seed=1))
    assert made.gates
    activation = ACTIVATIONS[name]
    assert activation.native is not None
    for rows in (1, 6, 9):
        x = random(rows, 70, seed=2)
        want = act_mul(native_linear(x, made, torch.bfloat16), activation)
        assert torch.equal(native_gated(x, made, activation.native), want)


@pytest.mark.parametrize("shape", [(960, 576), (97, 1537)], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(shape: tuple[int, int]) -> None:
    made = native(random(*shape, seed=0), None)
    x = random(70, shape[1], seed=1)
    together = native_linear(x, made, torch.float32)
    torch.set_num_threads(2)
    assert torch.equal(native_linear(x, made, torch.float32), together)
    for first, last in ((0, 1), (1, 9), (65, 70)):
        assert torch.equal(native_linear(x[first:last], made, torch.float32), together[first:last])


def test_strided_rows_are_supported() -> None:
    made = native(random(48, 40, seed=0))
    wide = random(5, 100, seed=1)
    want = native_linear(wide[:, 7:47].contiguous(), made, torch.float32)
    assert torch.equal(native_linear(wide[:, 7:47], made, torch.float32), want)
    transposed = random(40, 5, seed=2).t()
    assert torch.equal(
        native_linear(transposed, made, torch.float32), native_linear(transposed.contiguous(), made, torch.float32)
    )


def test_leading_dimensions_and_zero_rows_are_supported() -> None:
    made = native(random(48, 40, seed=0))
    assert native_linear(random(2, 3, 40, seed=1), made, torch.bfloat16).shape == (2, 3, 48)
    assert native_linear(random(0, 40, seed=1), made, torch.bfloat16).shape == (0, 48)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_weight_is_packed_in_bf16(shape: tuple[int, int]) -> None:
    assert pack(random(*shape, seed=0)).native is not None


def test_the_layout_is_blocks_of_64_outputs_by_pairs_of_inputs() -> None:
    weight = random(97, 35, seed=0)
    blocks = packed_blocks(weight)
    assert blocks.shape == (2, 32, 64, 2)
    padded = torch.zeros(128, 64, dtype=torch.bfloat16)
    padded[:97, :35] = weight
    for out, pair in ((0, 0), (63, 3), (64, 16), (96, 17), (97, 0), (127, 31)):
        assert torch.equal(blocks[out // 64, pair, out % 64], padded[out, 2 * pair : 2 * pair + 2])


def test_the_kernel_supports_only_bf16_on_a_cpu() -> None:
    assert native_weight(torch.zeros(64, 32), None) is None
    assert native_weight(torch.zeros(64, 32, dtype=torch.bfloat16, device="meta"), None) is None


def test_changing_a_weight_after_packing_has_no_effect() -> None:
    """The packed weight is a copy, also if its shape needs no padding."""
    weight, x = random(64, 32, seed=0), random(3, 32, seed=1)
    made = native(weight)
    want = native_linear(x, made, torch.float32)
    weight.zero_()
    assert torch.equal(native_linear(x, made, torch.float32), want)


def test_without_the_library_no_weight_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native_library", lambda: None)
    assert pack(random(64, 32, seed=0)).native is None
    weight, x = random(64, 32, seed=0, scale=0.2), random(3, 32, seed=1)
    want = act_mul(packed_linear(x, pack(weight)), ACTIVATIONS["gelu"])
    assert torch.equal(gated_linear(x, pack(weight), ACTIVATIONS["gelu"]), want)
