"""FP8 (e4m3) layers of the methods fp8 and compressed-tensors, with scales per tensor, per output or per block."""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.weights.layer_format import FLOATS, BadPartError, LayerFormat, LayerTensors, Shape, num_groups

#: The bits without the sign of the code that means NaN.
_NAN = 0x7F


def make_fp8_format(scales: str) -> LayerFormat:
    """Return the format whose scales have this name."""

    def shapes(config: QuantisedConfig, given: Mapping[str, Shape]) -> tuple[tuple[int, int], dict[str, Shape]]:
        out, size = (*given["weight"], 0, 0)[:2]
        if config.block_outputs is not None:
            expected: Shape = (-(-out // config.block_outputs), num_groups(config, size))
        else:
            of_tensor_or_output = ((), (1,), (1, 1), (out,), (out, 1))
            expected = given[scales] if given[scales] in of_tensor_or_output else (out, 1)
        of_inputs = given.get("input_scale")
        input_scale = of_inputs if of_inputs in ((), (1,)) else (1,)
        return (out, size), {"weight": (out, size), scales: expected, "input_scale": input_scale}

    def read(config: QuantisedConfig, parts: Mapping[str, Tensor]) -> LayerTensors:
        weight = parts["weight"].view(torch.uint8)
        for part in parts.keys() - {"weight"}:
            _check_scales(part, parts[part])
        return LayerTensors(
            unpack=lambda outputs: _numbers(_checked(weight[outputs], outputs.start)),
            codes=lambda outputs: _checked(weight[outputs], outputs.start),
            scales=_scales_of_outputs(config, parts[scales], len(weight)),
            input_scale=parts["input_scale"].item() if "input_scale" in parts else None,
        )

    return LayerFormat(
        codes="e4m3",
        types={"weight": ("F8_E4M3",), scales: FLOATS, "input_scale": FLOATS},
        scales=scales,
        optional=frozenset({"input_scale"}),
        shapes=shapes,
        read=read,
    )


#: Both names mean the factor of the codes; DeepSeek calls it inverse, as the codes were made with its inverse.
FP8_FORMATS = tuple(make_fp8_format(name) for name in ("weight_scale", "weight_scale_inv"))


def _scales_of_outputs(config: QuantisedConfig, scales: Tensor, out: int) -> Tensor:
    """Return the scales in fp32, [outputs, groups]."""
    if config.block_outputs is not None:
        return scales.float().repeat_interleave(min(config.block_outputs, out), 0)[:out]
    return scales.float().reshape(-1, 1).expand(out, 1)


def _check_scales(part: str, scales: Tensor) -> None:
    bad = scales[~scales.isfinite() | (scales <= 0)]
    if bad.numel():
        raise BadPartError(part, f"a scale is {bad[0].item()}, but it must be a positive number")


def _checked(codes: Tensor, first_output: int) -> Tensor:
    magnitudes = codes.bitwise_and(_NAN)
    if magnitudes.amax() == _NAN:
        output = first_output + int(magnitudes.amax(1).argmax())
        raise BadPartError("weight", f"output {output} has a weight that is not a number (NaN)")
    return codes


def _numbers(codes: Tensor) -> Tensor:
    """Return e4m3 codes as fp32, exactly: with shifted bits they are fp16 numbers that are 256 times too small."""
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)  # drop the copied sign
    return bits.view(torch.float16).float().mul_(256)
