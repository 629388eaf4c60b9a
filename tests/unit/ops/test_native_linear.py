"""Our bf16 linear at every level of this CPU against fp64. A row's bits depend neither on other rows nor on threads."""

import ctypes
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from octavo_engine.ops import native_linear as module
from octavo_engine.ops.activation import ACTIVATIONS, act_mul
from octavo_engine.ops.cpu_level import LEVELS, Level
from octavo_engine.ops.native_library import load_library
from octavo_engine.ops.native_linear import NativeWeight, native_gated, native_linear, native_weight, packed_panels
from octavo_engine.ops.packed_linear import gated_linear, pack, packed_linear
from octavo_testing.kernel_levels import emulated, levels_to_test
from torch import Tensor

HAS_AMX = levels_to_test()[0].name == "amx"
# out, in
SHAPES = [(64, 32), (97, 35), (1, 1), (16, 2), (33, 576), (130, 63), (192, 576), (32, 2880), (31, 33), (544, 1)]
DIGESTS: dict[str, str] = json.loads(Path(__file__).with_name("linear_digests.json").read_text())
ROWS = (1, 2, 3, 7, 16, 17, 31, 33, 64, 256)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def native(weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> NativeWeight:
    made = native_weight(weight, bias, gated=gated)
    assert made is not None, "these tests need g++"
    return made


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)
    return int(request.param)


@pytest.fixture(autouse=True)
def _level(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> None:
    monkeypatch.setattr(module, "native_library", lambda: library)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["to-bf16", "to-fp32"])
def test_outputs_equal_fp64(threads: int, shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    weight = random(*shape, seed=0, scale=shape[1] ** -0.5)
    b = random(shape[0], seed=1) if bias else None
    made = native(weight, b)
    for rows in (1, 2, 5, 16, 19, 33, 71):
        x = random(rows, shape[1], seed=2)
        want = x.double() @ weight.double().T + (0 if b is None else b.double())
        got = native_linear(x, made, dtype)
        assert got.dtype == dtype
        rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=rtol)


def test_a_vocabulary_that_is_no_multiple_of_a_panel_is_supported() -> None:
    weight, x = random(49153, 33, seed=0), random(2, 33, seed=1)
    torch.testing.assert_close(
        native_linear(x, native(weight), torch.float32), x.float() @ weight.float().T, atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("size", [16, 48, 64, 80, 176])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gated_outputs_have_the_bits_of_two_separate_steps(threads: int, size: int, name: str) -> None:
    """A step may thus use either way, for any number of rows."""
    weight, bias = random(2 * size, 70, seed=0, scale=0.3), random(2 * size, seed=1)
    made, plain = native(weight, bias, gated=True), native(weight, bias)
    assert made.gated
    activation = ACTIVATIONS[name]
    assert activation.native is not None
    for rows in (1, 6, 9, 40):
        x = random(rows, 70, seed=2)
        both = native_linear(x, made, torch.bfloat16)
        assert torch.equal(both, native_linear(x, plain, torch.bfloat16))
        assert torch.equal(native_gated(x, made, activation.native), act_mul(both, activation))


def test_halves_that_are_no_whole_units_are_not_gated() -> None:
    assert not native(random(50, 32, seed=0), gated=True).gated


@pytest.mark.parametrize("shape", [(160, 576), (97, 1537), (64, 64)], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int]) -> None:
    made = native(random(*shape, seed=0), None)
    x = random(max(ROWS), shape[1], seed=1)
    together = native_linear(x, made, torch.float32)
    torch.set_num_threads(2)
    for rows in ROWS:
        assert torch.equal(native_linear(x[:rows], made, torch.float32), together[:rows])
        assert torch.equal(native_linear(x[-rows:], made, torch.float32), together[-rows:])


def test_outputs_have_the_bits_of_the_golden_file(level: Level) -> None:
    """Products of bf16 are exact, so that levels with the same order of sums have the same bits."""
    random = np.frombuffer(hashlib.shake_256(b"bf16").digest(2 * (97 + 70) * 1999), np.uint16)
    bits = random & 0x83FF | 0x3C00  # of both signs, from 2^-7 to 2
    values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    weight, x = values[: 97 * 1999].view(97, 1999), values[97 * 1999 :].view(70, 1999)
    found = native_linear(x, native(weight), torch.float32)
    order = "tiles" if level.name == "amx" or level.name.startswith("emulated") else "pairs"
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest() == DIGESTS[order]


def test_more_rows_than_a_chunk_of_tiles_have_the_same_bits() -> None:
    made, x = native(random(64, 96, seed=0)), random(1043, 96, seed=1)
    together = native_linear(x, made, torch.float32)
    assert torch.equal(native_linear(x[1000:], made, torch.float32), together[1000:])


@pytest.mark.parametrize("rows", [3, 18, 40])
@pytest.mark.parametrize("in_features", [32, 35, 64])
def test_nan_and_infinity_stay_in_their_row(rows: int, in_features: int) -> None:
    made, x = native(random(40, in_features, seed=0)), random(rows, in_features, seed=1)
    want = native_linear(x, made, torch.float32)
    x[1], x[-1, -1] = torch.inf, torch.nan
    got = native_linear(x, made, torch.float32)
    assert torch.equal(got[2:-1], want[2:-1])
    assert torch.equal(got[0], want[0])
    assert got[-1].isnan().all()
    assert not got[1].isfinite().any()


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


def test_torch_multiplies_on_the_same_threads() -> None:
    """oneDNN may use AMX with its own tile configuration, before and after ours."""
    weight, x = random(96, 64, seed=0), random(50, 64, seed=1)
    made = native(weight)
    for _ in range(3):
        torch.testing.assert_close(
            native_linear(x, made, torch.bfloat16), torch.nn.functional.linear(x, weight), atol=0.1, rtol=2**-7
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_weight_is_packed_in_bf16(shape: tuple[int, int]) -> None:
    assert pack(random(*shape, seed=0)).native is not None


def test_the_layout_is_panels_of_32_outputs() -> None:
    weight = random(97, 35, seed=0)
    panels = packed_panels(weight)
    assert panels.shape == (4, 2, 2, 16, 16, 2)
    padded = torch.zeros(128, 64, dtype=torch.bfloat16)
    padded[:97, :35] = weight
    for out, pair in ((0, 0), (63, 3), (64, 16), (96, 17), (97, 0), (127, 31)):
        got = panels[out // 32, pair // 16, out % 32 // 16, pair % 16, out % 16]
        assert torch.equal(got, padded[out, 2 * pair : 2 * pair + 2])


def test_gates_alternate_with_the_second_half() -> None:
    weight = random(96, 32, seed=0)
    panels = packed_panels(weight, gated=True)
    for out in (0, 17, 47):
        for unit in (0, 1):
            assert torch.equal(panels[out // 16, 0, unit, 3, out % 16], weight[unit * 48 + out, 6:8])


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


@pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX")
def test_emulated_tiles_have_the_bits_of_real_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(97, 1000, seed=0)
    weight[:, ::3] *= 2.0**-70
    amx, without = (next(level for level in LEVELS if level.name == name) for name in ("amx", "avx512bf16"))
    results = []
    for level in (amx, emulated(without)):
        library = load_library("g++", level)
        monkeypatch.setattr(module, "native_library", lambda found=library: found)
        made = native(weight)
        inputs = (random(rows, 1000, seed=rows, scale=2.0**scale) for rows, scale in ((1, 0), (16, -60), (50, 9)))
        results.append(torch.cat([native_linear(x, made, torch.float32) for x in inputs]))
    assert torch.equal(*results)
