"""Packed formats with extreme codes, zero points and groups give scale * (code - zero), in blocks and expanded."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from octavo_engine.ops.group_tensor import GroupTensor, expand_groups
from octavo_engine.ops.native_quantised import QuantisedTensor
from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.sources.safetensors_header import SafeTensor
from octavo_engine.weights.quantised_layers import iter_quantised, quantised_layers
from torch import Tensor
from torch.nn import functional as F

OUT, SIZE, GROUP = 16, 64, 32
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class Case:
    layout: str
    bits: int
    symmetric: bool
    version: int = 0  # of GPTQ's format

    def __str__(self) -> str:
        return (
            f"{self.layout} {self.bits} bits{' symmetric' * self.symmetric}{f' v{self.version}' * bool(self.version)}"
        )


CASES = [
    *(Case("gptq", bits, symmetric, v) for bits in (4, 8) for symmetric in (True, False) for v in (1, 2)),
    *(Case("awq", 4, symmetric) for symmetric in (True, False)),
    *(Case("pack-quantized", bits, symmetric) for bits in (4, 8) for symmetric in (True, False)),
    *(Case("int-quantized", 8, symmetric) for symmetric in (True, False)),
]


def packed(values: Tensor, bits: int, *, less_each: int = 0) -> Tensor:
    """Pack rows of unsigned numbers into int32, the first in the lowest bits; subtract a number of each with borrow."""
    per_int = 32 // bits
    fields = values.numpy().astype(np.uint64).reshape(len(values), -1, per_int)
    words = (fields << np.arange(0, 32, bits, dtype=np.uint64)).sum(-1).astype(np.int64)
    ones = sum(less_each << shift for shift in range(0, 32, bits))
    return torch.from_numpy(((words - ones) % 2**32).astype(np.uint32).view(np.int32))


def parts_of(case: Case, codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Store unsigned codes [out, in], zeros and scales [out, groups] as the layout does."""
    half = 1 << (case.bits - 1)
    match case.layout:
        case "gptq":
            less = int(case.version == 1)
            qzeros = packed(F.pad(zeros.t(), (0, -len(zeros) % (32 // case.bits))), case.bits, less_each=less)
            return {"qweight": packed(codes, case.bits).t(), "qzeros": qzeros, "scales": scales.t()}
        case "awq":
            order = [AWQ_PLACES.index(i) for i in range(8)]
            stored = [packed(x.t().reshape(x.shape[1], -1, 8)[..., order].flatten(1), 4) for x in (codes, zeros)]
            return {"qweight": stored[0], "qzeros": stored[1], "scales": scales.t()}
        case "pack-quantized":
            parts = {"weight_packed": packed(codes, case.bits), "weight_scale": scales}
            parts["weight_shape"] = torch.tensor(codes.shape)
            zero_points = packed(F.pad(zeros.t(), (0, -len(zeros) % (32 // case.bits))), case.bits).t()
        case _:
            parts = {"weight": (codes - half).to(torch.int8), "weight_scale": scales}
            zero_points = (zeros - half).to(torch.int8)
    return parts if case.symmetric else parts | {"weight_zero_point": zero_points}


def read(case: Case, parts: dict[str, Tensor], *, as_blocks: bool, as_groups: bool = False) -> Tensor:
    method = {"pack-quantized": "compressed-tensors", "int-quantized": "compressed-tensors"}.get(
        case.layout, case.layout
    )
    config = QuantisedConfig(
        method=method,
        layout=case.layout,
        bits=case.bits,
        group_size=GROUP,
        symmetric=case.symmetric,
        zero_offset=int(case.version == 1),
    )
    types = {torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.float16: "F16"}
    headers = {
        f"l.{name}": SafeTensor(
            name=f"l.{name}", dtype=types[part.dtype], shape=tuple(part.shape), offset=0, num_bytes=part.nbytes
        )
        for name, part in parts.items()
    }
    layers = quantised_layers(config, headers)
    as_blocks = as_blocks and layers["l.weight"].type is not None  # 8 bits with zero points have none
    tensors = [(f"l.{name}", part.contiguous()) for name, part in parts.items()]
    if as_groups and layers["l.weight"].group_format is not None:  # 8 bits with zero points have none
        ((_, grouped),) = iter_quantised(layers, tensors, dtype=None, blocks=(), groups={"l.weight"})
        assert isinstance(grouped, GroupTensor)
        values = expand_groups(grouped, torch.float32)
        return values if grouped.order is None else values[:, grouped.order.argsort()]
    ((_, found),) = iter_quantised(layers, tensors, dtype=torch.float32, blocks={"l.weight"} if as_blocks else ())
    assert isinstance(found, QuantisedTensor) == as_blocks
    if not isinstance(found, QuantisedTensor):
        return found
    values = torch.from_numpy(dequantize(found.rows.numpy(), GGMLQuantizationType[found.format.name]))
    return values if found.order is None else values[:, found.order.argsort()]


def extremes(case: Case, out: int = OUT, size: int = SIZE) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes in which each extreme has each neighbour, zero points with the same, and scales of both signs."""
    last = (1 << case.bits) - 1
    draw = torch.Generator().manual_seed(case.bits)
    values = torch.tensor([0, last, 1, last - 1, last // 2, last // 2 + 1])
    codes = values[torch.randint(0, 6, (out, size), generator=draw)]
    codes[0], codes[1] = 0, last
    zeros = values[torch.randint(0, 6, (out, size // GROUP), generator=draw)]
    zeros[:4, :2] = torch.tensor([[0, last], [last, 0], [0, 0], [last, last]])
    scales = torch.randint(-8, 9, zeros.shape, generator=draw).half() / 16
    return codes, torch.full_like(zeros, 1 << (case.bits - 1)) if case.symmetric else zeros, scales


def expected(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return scales.float()[:, groups] * (codes - zeros[:, groups])


@pytest.mark.parametrize("form", ["expanded", "blocks", "groups"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_extreme_codes_are_the_unpacked_weights(case: Case, form: str) -> None:
    codes, zeros, scales = extremes(case)
    parts = parts_of(case, codes, zeros, scales)
    found = read(case, parts, as_blocks=form == "blocks", as_groups=form == "groups")
    assert torch.equal(found, expected(codes, zeros, scales, torch.arange(SIZE) // GROUP))


#: Layout -> the part that has the group of each input.
GROUP_PARTS = {"gptq": "g_idx", "pack-quantized": "weight_g_idx"}
#: Cases, outputs of which the last slice has one column of AWQ's integers, or an odd number, and if groups mix inputs.
SLICED = [
    (case, out, is_mixed)
    for case in CASES
    for out in ((40,) if case.layout == "awq" else (40, 43))
    for is_mixed in ((False, True) if case.layout in GROUP_PARTS else (False,))
]


@pytest.mark.parametrize("form", ["expanded", "blocks", "groups"])
@pytest.mark.parametrize(("case", "out", "is_mixed"), SLICED, ids=str)
def test_slices_of_outputs_are_the_unpacked_weights(
    case: Case, out: int, is_mixed: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = GROUP_PARTS.get(case.layout)
    monkeypatch.setattr("octavo_engine.weights.quantised_layers._SLICE", 16 * 96)
    codes, zeros, scales = extremes(case, out, 96)
    groups = torch.arange(96) % 3 if is_mixed else torch.arange(96) // GROUP
    parts = parts_of(case, codes, zeros, scales) | ({} if part is None else {part: groups.int()})
    found = read(case, parts, as_blocks=form == "blocks", as_groups=form == "groups")
    assert torch.equal(found, expected(codes, zeros, scales, groups))


GROUPS = {
    "in order": torch.arange(SIZE) // GROUP,
    "mixed": torch.arange(SIZE) % (SIZE // GROUP),
    "unordered": torch.full((SIZE,), -1),
    "in part unordered": (torch.arange(SIZE) % (SIZE // GROUP)).index_fill(0, torch.tensor([5]), -1),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("as_blocks", [False, True], ids=["expanded", "blocks"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("case", [case for case in CASES if case.layout == "pack-quantized"], ids=str)
def test_a_group_of_less_than_zero_means_inputs_in_order(
    case: Case, groups: str, as_blocks: bool, dtype: torch.dtype
) -> None:
    codes, zeros, scales = extremes(case)
    parts = parts_of(case, codes, zeros, scales) | {"weight_g_idx": GROUPS[groups].to(dtype)}
    used = GROUPS["in order" if "unordered" in groups else groups]
    assert torch.equal(read(case, parts, as_blocks=as_blocks), expected(codes, zeros, scales, used))
