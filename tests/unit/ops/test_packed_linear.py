"""Packed linears equal plain linears, and are plain if torch's private operators are missing or raise."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo_engine.ops import native_linear as native_module
from octavo_engine.ops import packed_linear as module
from octavo_engine.ops.activation import ACTIVATIONS
from octavo_engine.ops.packed_linear import (
    PackedWeight,
    gated_linear,
    num_layouts,
    pack,
    packed_linear,
    small_linear,
    wide_linear,
)
from octavo_testing.onednn import install_other_onednn
from torch.nn import functional as F

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def refuse(*arguments: Any) -> torch.Tensor:
    raise RuntimeError("this CPU can't")


BROKEN = {
    "no such operators": SimpleNamespace(),
    "refused when packing": SimpleNamespace(
        _is_mkldnn_bf16_supported=lambda: True, _reorder_linear_weight=refuse, _linear_pointwise=refuse
    ),
    "refused when multiplying": SimpleNamespace(
        _is_mkldnn_bf16_supported=lambda: True, _reorder_linear_weight=lambda w, n: w, _linear_pointwise=refuse
    ),
    "another signature": SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True, _reorder_linear_weight=lambda w: w),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("rows", [(1,), (3,), (65,), (2, 5)], ids=str)
def test_packed_equals_plain(dtype: torch.dtype, bias: bool, rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 72, generator=generator).to(dtype) / 8
    x = torch.randn(*rows, 72, generator=generator).to(dtype)
    b = torch.randn(40, generator=generator).to(dtype) if bias else None
    packed = pack(weight, b)
    assert (packed.out_features, packed.in_features) == (40, 72)
    want = F.linear(x.float(), weight.float(), None if b is None else b.float())
    got = packed_linear(x, packed)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_this_torch_has_the_private_operators() -> None:
    """A failure after an upgrade of torch means that `packed_linear.py` uses its slower path; results stay correct."""
    assert pack(torch.randn(8, 8)).packed is not None


def test_a_transposed_weight_and_strided_rows_are_supported() -> None:
    weight, x = torch.randn(24, 16).t(), torch.randn(5, 48)[:, 8:32]
    torch.testing.assert_close(packed_linear(x, pack(weight)), F.linear(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packing_falls_back_to_the_plain_weight(
    monkeypatch: pytest.MonkeyPatch, fault: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "_mkldnn", lambda: BROKEN[fault])
    monkeypatch.setattr(native_module, "native_library", lambda: None)
    weight, x = torch.randn(6, 4).to(dtype), torch.randn(3, 4).to(dtype)
    packed = pack(weight)
    assert packed.packed is None
    assert torch.equal(packed_linear(x, packed), F.linear(x, weight))


@pytest.mark.parametrize("fault", BROKEN)
def test_our_kernel_needs_no_onednn(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(module, "_mkldnn", lambda: BROKEN[fault])
    monkeypatch.setattr(module, "_has_matrix_instructions", lambda: True)
    weight, x = torch.randn(70, 34).bfloat16(), torch.randn(20, 34).bfloat16()
    packed = pack(weight)
    assert (packed.native is not None, packed.packed, packed.plain) == (True, None, None)
    torch.testing.assert_close(packed_linear(x, packed).float(), x.float() @ weight.float().T, atol=3e-2, rtol=3e-2)


def test_a_weight_is_kept_once_without_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    install_other_onednn(monkeypatch)
    monkeypatch.setattr(module, "_has_matrix_instructions", lambda: False)
    assert pack(torch.zeros(64, 32, dtype=torch.bfloat16)).num_layouts == num_layouts(torch.bfloat16) == 1


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> PackedWeight:
    """Make a weight in our layout and in that of a fake oneDNN, whose products are all zero."""
    monkeypatch.setattr(install_other_onednn(monkeypatch), "_linear_pointwise", zero_product, raising=False)
    packed = pack(torch.randn(64, 32).bfloat16())
    assert packed.num_layouts == num_layouts(torch.bfloat16) == 2
    return packed


def zero_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, *post: Any) -> torch.Tensor:
    return x.new_zeros(len(x), packed.shape[1])


def test_matrix_instructions_multiply_many_rows(both: PackedWeight) -> None:
    x = torch.randn(module.MOST_ROWS + 1, 32).bfloat16()
    assert packed_linear(x, both).count_nonzero() == 0
    assert gated_linear(x, both, ACTIVATIONS["silu"]).count_nonzero() == 0
    assert packed_linear(x[1:], both).count_nonzero() > 0
    assert gated_linear(x[1:], both, ACTIVATIONS["silu"]).count_nonzero() > 0


def test_a_wide_weight_is_never_kept_twice(both: PackedWeight) -> None:
    packed = pack(torch.zeros(64, 32, dtype=torch.bfloat16), wide=True)
    assert packed.num_layouts == num_layouts(torch.bfloat16, wide=True) == 1
    assert packed.packed is None


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "torch"])
def test_a_wide_product_is_as_exact_as_fp32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, with_kernels: bool
) -> None:
    if not with_kernels:
        monkeypatch.setattr(native_module, "native_library", lambda: None)
    monkeypatch.setattr(module, "_WIDE_CHUNK_BYTES", 4 * 96 * 30)  # of 30 rows: the last chunk has fewer
    torch.manual_seed(0)
    weight, x, b = torch.randn(101, 96).to(dtype), torch.randn(7, 96).to(dtype), torch.randn(101).to(dtype)
    want = x.double() @ weight.double().T + (b.double() if bias else 0)
    got = wide_linear(x, pack(weight, b if bias else None, wide=True))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-5)


def test_a_wide_weight_of_16_bits_stays_plain_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head then shares the embedding's memory."""
    monkeypatch.setattr(native_module, "native_library", lambda: None)
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.randn(8, 8).to(dtype)
        plain = pack(weight, wide=True).plain
        assert plain is not None
        assert plain.data_ptr() == weight.data_ptr()
        assert num_layouts(dtype, wide=True) == 0


def test_a_weight_is_plain_or_packed() -> None:
    for dtype in TOLERANCE:
        packed = pack(torch.randn(8, 8).to(dtype))
        assert (packed.num_layouts == 0) == (packed.plain is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_products_by_one_thread_have_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = pack(torch.randn(96, 64).to(dtype)), torch.randn(40, 64).to(dtype)
    want = packed_linear(x, weight)
    assert torch.equal(small_linear(x, weight), want)
    monkeypatch.setattr(module, "MOST_OF_ONE_THREAD", 0)
    assert torch.equal(small_linear(x, weight), want)


def test_packing_for_another_device_compiles_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` stands for a GPU, on which an engine would wait minutes for kernels that it does not use."""
    compiled: list[None] = []
    monkeypatch.setattr(native_module, "native_library", lambda: compiled.append(None))
    packed = pack(torch.zeros(32, 32, dtype=torch.bfloat16, device="meta"), gated=True)
    assert packed.num_layouts == 0
    assert compiled == []
    pack(torch.zeros(32, 32, dtype=torch.bfloat16))
    assert compiled == [None]
