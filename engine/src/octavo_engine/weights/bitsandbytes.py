"""bitsandbytes checkpoints: NF4 and FP4 in blocks of the flattened weight, and int8 with a scale per output."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.weights.layer_format import BadPartError, LayerFormat, LayerTensors, Shape

#: dtype of a lookup table for bytes, each entry of which holds the fp32 values of a byte's two codes.
_PAIR = torch.int64
#: The library divides by 127, rounded as here.
_PER_CODE = 7.874015718698502e-3
_MOST_STATE_BYTES = 1 << 20
_LARGEST = torch.finfo(torch.float32).max


def make_four_bit_format(codes: str) -> LayerFormat:
    state_name = f"weight.quant_state.bitsandbytes__{codes}"

    def shapes(config: QuantisedConfig, given: Mapping[str, Shape]) -> tuple[tuple[int, int], dict[str, Shape]]:
        """Return a shape with the layer's number of weights: only the layer's `quant_state` has its real shape."""
        tables: dict[str, Shape] = {"weight.quant_map": (16,), "weight.nested_quant_map": (256,)}
        return (2 * math.prod(given["weight"]), 1), {**given, **{part: tables[part] for part in tables & given.keys()}}

    def read(config: QuantisedConfig, parts: Mapping[str, Tensor]) -> LayerTensors:
        state = _State(state_name, parts[state_name], codes)
        out, size = state.shape
        packed, count = parts["weight"].flatten(), out * size
        if len(packed) != (count + 1) // 2:
            raise BadPartError("weight", f"it has {len(packed)} bytes, but {count} weights need {(count + 1) // 2}")
        table = parts["weight.quant_map"]
        if not table.isfinite().all():
            raise BadPartError("weight.quant_map", f"a number of the table is {table[~table.isfinite()][0].item()}")
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), -1).view(_PAIR).flatten()
        run = state.run
        scales = _scales(state, parts, count).repeat_interleave(min(state.block_size, count) // run)[: count // run]
        return LayerTensors(
            unpack=_by_rows(packed, size, lambda octets: pairs.index_select(0, octets.int()).view(torch.float32)),
            codes=_by_rows(packed, size, lambda octets: torch.stack((octets >> 4, octets & 15), -1)),
            table=table,
            scales=scales.view(out, -1),
            shape=state.shape,
            group_size=run,
        )

    def layer_shape(tensor: Tensor) -> tuple[tuple[int, int], int]:
        state = _State(state_name, tensor, codes)
        return state.shape, state.run

    return LayerFormat(
        codes=codes,
        types={
            state_name: ("U8",),
            "weight": ("U8",),
            "weight.absmax": ("F32", "U8"),
            "weight.quant_map": ("F32",),
            "weight.nested_absmax": ("F32",),
            "weight.nested_quant_map": ("F32",),
        },
        scales="weight.absmax",
        optional=frozenset({"weight.nested_absmax", "weight.nested_quant_map"}),
        shapes=shapes,
        read=read,
        shaped_by=state_name,
        layer_shape=layer_shape,
    )


def _by_rows(packed: Tensor, size: int, unpack: Callable[[Tensor], Tensor]) -> Callable[[slice], Tensor]:
    """Return a function that unpacks a slice of outputs, which begins at an even one."""

    def unpack_rows(outputs: slice) -> Tensor:
        first, last = outputs.start * size, outputs.stop * size
        values = unpack(packed[first // 2 : (last + 1) // 2])
        return values.flatten()[: last - first].view(-1, size)

    return unpack_rows


class _State:
    """The JSON object that describes a 4-bit weight; its values are checked when they are read."""

    def __init__(self, name: str, tensor: Tensor, codes: str) -> None:
        self.name = name
        if tensor.nbytes > _MOST_STATE_BYTES:
            raise BadPartError(name, f"it has {tensor.nbytes} bytes, the limit is {_MOST_STATE_BYTES}")
        try:
            self.values: Any = json.loads(bytes(tensor.flatten().tolist()))
        except (ValueError, RecursionError) as error:
            raise BadPartError(name, "it is not JSON") from error
        if not isinstance(self.values, dict):
            raise BadPartError(name, "it is no JSON object")
        if (kind := self.values.get("quant_type")) != codes:
            raise BadPartError(name, f"quant_type is {kind!r} instead of {codes!r}", "use a checkpoint of nf4 or fp4")
        self.block_size = self.size("blocksize")
        shape = self.values.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            raise BadPartError(name, f"shape is {shape!r} instead of two positive numbers")
        self.shape = (shape[0], shape[1])

    @property
    def run(self) -> int:
        """The largest number of inputs that divides both a row and a block."""
        return math.gcd(self.shape[1], min(self.block_size, math.prod(self.shape)))

    def size(self, key: str) -> int:
        value = self.values.get(key)
        if type(value) is not int or value < 1:
            raise BadPartError(self.name, f"{key} is {value!r} instead of a positive number")
        return value

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if type(value) not in (int, float) or not abs(value) <= _LARGEST:
            raise BadPartError(self.name, f"{key} is {value!r} instead of a number of fp32")
        return float(value)


def _scales(state: _State, parts: Mapping[str, Tensor], num_weights: int) -> Tensor:
    """Return the scale of each block in fp32; scales in uint8 are themselves quantised."""
    absmax = parts["weight.absmax"].flatten()
    _check_count("weight.absmax", absmax, num_weights, state.block_size)
    if absmax.dtype == torch.float32:
        return absmax
    for part in ("weight.nested_absmax", "weight.nested_quant_map"):
        if part not in parts:
            raise BadPartError(part, "it is missing, but absmax is quantised")
    nested_size, nested = state.size("nested_blocksize"), parts["weight.nested_absmax"].flatten()
    _check_count("weight.nested_absmax", nested, len(absmax), nested_size)
    numbers = parts["weight.nested_quant_map"].index_select(0, absmax.int())
    by_scale = nested.repeat_interleave(min(nested_size, len(absmax)))[: len(absmax)]
    return numbers * by_scale + state.number("nested_offset")


def _check_count(part: str, values: Tensor, num_values: int, block_size: int) -> None:
    expected = -(-num_values // block_size)
    if len(values) != expected:
        what = f"it has {len(values)} values, but {num_values} in blocks of {block_size} need {expected}"
        raise BadPartError(part, what)


def _int8_shapes(config: QuantisedConfig, given: Mapping[str, Shape]) -> tuple[tuple[int, int], dict[str, Shape]]:
    out, size = (*given["weight"], 0, 0)[:2]
    of_order = given.get("weight_format")
    order = of_order if of_order in ((), (1,)) else (1,)
    return (out, size), {"weight": (out, size), "SCB": (out,), "weight_format": order}


def _read_int8(config: QuantisedConfig, parts: Mapping[str, Tensor]) -> LayerTensors:
    weight, order = parts["weight"], int(parts["weight_format"]) if "weight_format" in parts else 0
    if order:
        what = f"the weights have the format {order}, but only rows (0) are supported"
        raise BadPartError("weight_format", what, "save the checkpoint again with a newer version of bitsandbytes")
    return LayerTensors(unpack=lambda outputs: weight[outputs], scales=parts["SCB"].unsqueeze(1), factor=_PER_CODE)


BITSANDBYTES_FORMATS = {
    "bitsandbytes-nf4": (make_four_bit_format("nf4"),),
    "bitsandbytes-fp4": (make_four_bit_format("fp4"),),
    "bitsandbytes-int8": (
        LayerFormat(
            codes="int8",
            types={"weight": ("I8",), "SCB": ("F32",), "weight_format": ("U8",)},
            scales="SCB",
            optional=frozenset({"weight_format"}),
            shapes=_int8_shapes,
            read=_read_int8,
        ),
    ),
}
