"""Quantises the tiny models of `tiny_models` by each method, and returns the weights that a right reader unpacks."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from octavo_testing.tiny_models import make_tiny

#: A layer's tensors by their names behind the layer's, and the unpacked weight.
Packed = tuple[dict[str, Tensor], Tensor]
GROUP = 8
BLOCK = (24, 40)
NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302, 0.2461123,
     0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
)  # fmt: skip


def pack_ints(values: Tensor, bits: int, *, less_each: int = 0) -> Tensor:
    """Pack rows of unsigned numbers into int32, the first in the lowest bits; subtract a number of each with borrow."""
    per_int = 32 // bits
    fields = values.numpy().astype(np.uint64).reshape(len(values), -1, per_int)
    words = (fields << np.arange(0, 32, bits, dtype=np.uint64)).sum(-1).astype(np.int64)
    ones = sum(less_each << shift for shift in range(0, 32, bits))
    return torch.from_numpy(((words - ones) % 2**32).astype(np.uint32).view(np.int32))


def _fp8(weight: Tensor, block: tuple[int, int], name: str, *, of_tensor: bool = False) -> Packed:
    (out, size), (block_out, block_in) = weight.shape, block
    padded = F.pad(weight, (0, -size % block_in, 0, -out % block_out))
    scales = padded.view(len(padded) // block_out, block_out, -1, block_in).abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(block_out, 0).repeat_interleave(block_in, 1)[:out, :size]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scales.flatten() if of_tensor else scales}, codes.float() * each


def fp8_block(weight: Tensor, block: tuple[int, int]) -> Packed:
    return _fp8(weight, block, "weight_scale_inv")


def fp8_tensor(weight: Tensor) -> Packed:
    parts, unpacked = _fp8(weight, tuple(weight.shape), "weight_scale", of_tensor=True)  # type: ignore[arg-type]
    return parts | {"input_scale": torch.tensor(0.1)}, unpacked


def ct_fp8_channel(weight: Tensor) -> Packed:
    return _fp8(weight, (1, weight.shape[1]), "weight_scale")


def nf4(weight: Tensor) -> Packed:
    flat = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    absmax = flat.abs().amax(1)
    codes = (flat / absmax[:, None]).flatten()[: weight.numel(), None].sub(NF4).abs().argmin(1)
    packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {
        "weight": packed[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": NF4.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (NF4[codes] * absmax.repeat_interleave(64)[: weight.numel()]).view(weight.shape)


def int8(weight: Tensor) -> Packed:
    absmax = weight.abs().amax(1)
    codes = (weight / absmax[:, None] * 127).round().to(torch.int8)
    parts = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * absmax[:, None] * 7.874015718698502e-3


def _four_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [out, in], zero points and scales [out, groups], and the unpacked weight."""
    groups = weight.view(len(weight), -1, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    unpacked = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1).int(), zeros.int(), scales, unpacked.flatten(1)


def gptq(weight: Tensor, group: int) -> Packed:
    codes, zeros, scales, unpacked = _four_bits(weight, group)
    parts = {"qweight": pack_ints(codes, 4).t(), "qzeros": pack_ints(zeros.t(), 4, less_each=1)}
    return parts | {"scales": scales.t().half()}, unpacked


def awq(weight: Tensor, group: int) -> Packed:
    codes, zeros, scales, unpacked = _four_bits(weight, group)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    columns = [pack_ints(x.t().reshape(x.shape[1], -1, 8)[..., order].flatten(1), 4) for x in (codes, zeros)]
    return {"qweight": columns[0], "qzeros": columns[1], "scales": scales.t().half()}, unpacked


def ct_packed(weight: Tensor, group: int) -> Packed:
    codes, zeros, scales, unpacked = _four_bits(weight, group)
    parts = {"weight_packed": pack_ints(codes, 4), "weight_zero_point": pack_ints(zeros.t(), 4).t()}
    return parts | {"weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}, unpacked


def ct_symmetric(weight: Tensor, group: int) -> Packed:
    """Return 4 bits with a zero point of 8."""
    groups = weight.view(len(weight), -1, group)
    scales = (groups.abs().amax(-1) / 7).half().float()
    codes = (groups / scales[..., None]).round().clamp(-8, 7)
    parts = {"weight_packed": pack_ints(codes.flatten(1).int() + 8, 4), "weight_scale": scales}
    return parts | {"weight_shape": torch.tensor(weight.shape)}, (codes * scales[..., None]).flatten(1)


def ct_int(weight: Tensor) -> Packed:
    """Return 8 bits with a scale for each output."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).half().float()
    codes = (weight / scales).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": {"weights": weights}}}


def layer_methods(group: int, block: tuple[int, int]) -> dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]]:
    """Return for each name the function that packs a layer, and `quantization_config`."""
    zero_points = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": group}
    symmetric = zero_points | {"symmetric": True}
    channels = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return {
        "fp8_block": (partial(fp8_block, block=block), {"quant_method": "fp8", "weight_block_size": list(block)}),
        "fp8_tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
        "ct_fp8_channel": (
            ct_fp8_channel,
            _compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ),
        "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        "int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        "gptq": (partial(gptq, group=group), {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": False}),
        "awq": (
            partial(awq, group=group),
            {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        ),
        "ct_packed": (partial(ct_packed, group=group), _compressed("pack-quantized", zero_points)),
        "ct_symmetric": (partial(ct_symmetric, group=group), _compressed("pack-quantized", symmetric)),
        "ct_int": (ct_int, _compressed("int-quantized", channels)),
    }


METHODS = layer_methods(GROUP, BLOCK)


def make_quantised(
    family: str, method: str, folder: Path, *, group: int = GROUP, block: tuple[int, int] = BLOCK
) -> tuple[Path, Path]:
    """Write a tiny model whose projections are quantised, and one with its unpacked weights; return both folders.

    `group`: the inputs that share a scale; `block`: the outputs and inputs that do.
    """
    plain = make_tiny(family, folder)
    pack, settings = layer_methods(group, block)[method]
    packed: dict[str, Tensor] = {}
    unpacked: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        last = layer.rpartition(".")[2]
        if tensor.dim() != 2 or not ("_proj" in last or last in ("w1", "w2", "w3")):
            packed[name] = unpacked[name] = tensor
            continue
        parts, unpacked[name] = pack(tensor)
        packed |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    folders = folder / f"{family}-{method}", folder / f"{family}-{method}-unpacked"
    config = json.loads((plain / "config.json").read_text())
    for to, tensors, extra in zip(folders, (packed, unpacked), ({"quantization_config": settings}, {}), strict=True):
        to.mkdir()
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
        (to / "config.json").write_text(json.dumps(config | extra))
        (to / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    return folders
