"""Reads the layers of quantised checkpoints: as blocks of GGUF's types without any rounding, or expanded.

A weight is scale * (code - zero), so 4 bits with a zero point of 8 are Q4_0's blocks, other zero points give signed
numbers of 5 bits (Q5_0), and 8 bits with 128 are Q8_0's. The scale of a group is repeated in its blocks. If groups mix
inputs (act-order), the inputs are sorted by group, and the layer gathers them in this order.
"""

import logging
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float16, Int8, UInt8
from torch import Tensor

from octavo_engine.ops.native_quantised import QUANTISED_FORMATS, QuantisedFormat, QuantisedTensor
from octavo_engine.ops.single_thread import single_thread
from octavo_engine.sources.gguf_header import GGML_TYPES, GGMLType
from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.sources.safetensors_header import SafeTensor
from octavo_engine.weights.awq import AWQ
from octavo_engine.weights.compressed_tensors import INT_QUANTIZED, PACK_QUANTIZED
from octavo_engine.weights.fresh_memory import fresh_tensor
from octavo_engine.weights.gptq import GPTQ
from octavo_engine.weights.layer_format import LayerFormat, num_groups
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)

FORMATS = {"gptq": GPTQ, "awq": AWQ, "pack-quantized": PACK_QUANTIZED, "int-quantized": INT_QUANTIZED}
#: Bits, and whether all zero points are equal -> the type of the blocks that hold such weights.
_TYPES = {(4, True): GGML_TYPES[2], (4, False): GGML_TYPES[6], (8, True): GGML_TYPES[8]}
_BLOCK = 32
#: Outputs that are unpacked at a time; AWQ packs eight of them.
_OUTPUTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLayer:
    """A layer by its header. `parts`: names of its tensors in the checkpoint, without the layer's name."""

    name: str
    config: QuantisedConfig
    shape: tuple[int, int]
    parts: frozenset[str]
    num_bytes: int

    @property
    def group_size(self) -> int:
        return self.config.group_size or self.shape[1]

    @property
    def num_groups(self) -> int:
        return num_groups(self.config, self.shape[1])

    @property
    def type(self) -> GGMLType | None:
        return None if self.group_size % _BLOCK else _TYPES.get((self.config.bits, self.config.symmetric))

    @property
    def format_name(self) -> str:
        zeros = "" if self.config.symmetric else " with zero points"
        return f"{self.config.method} of {self.config.bits} bits in groups of {self.group_size}{zeros}"


def quantised_layers(config: QuantisedConfig, headers: Mapping[str, SafeTensor]) -> dict[str, QuantisedLayer]:
    """Return the layers by the names of their weights. Raises StartupError for missing parts and wrong shapes."""
    layer_format = FORMATS[config.layout]
    layers: dict[str, dict[str, SafeTensor]] = {}
    for name, tensor in headers.items():
        layer, _, part = name.rpartition(".")
        if part in layer_format.types:
            layers.setdefault(layer, {})[part] = tensor
    quantised = {name: parts for name, parts in layers.items() if parts.keys() != {"weight"}}
    return {f"{name}.weight": _checked(name, config, layer_format, parts) for name, parts in quantised.items()}


def log_settings(config: QuantisedConfig, names: Iterable[str]) -> None:
    """Warn if the list of layers that are not quantised names none of the checkpoint's, and log other activations."""
    known = [*names, "lm_head."]  # a tied head has no tensor
    if config.ignored and not any(_names(part, name) for part in config.ignored for name in known):
        _LOGGER.warning("quantization_config: no tensor has a name with one of %s", ", ".join(config.ignored))
    if config.activation_bits is not None:
        _LOGGER.info(
            "the checkpoint was made for activations of %d bits; they have 16 bits here, and 8 in products with blocks",
            config.activation_bits,
        )


def _names(pattern: str, name: str) -> bool:
    """Return True if a pattern, a part of a name or "re:" with an expression, names a tensor's layer."""
    layer = name.rpartition(".")[0]
    return bool(re.match(pattern[3:], layer)) if pattern.startswith("re:") else pattern in layer


def _checked(name: str, config: QuantisedConfig, layer: LayerFormat, parts: dict[str, SafeTensor]) -> QuantisedLayer:
    for part in layer.types:
        needs_zeros = part == layer.zeros and not config.symmetric
        if part not in parts and (needs_zeros or part not in layer.optional):
            raise StartupError(f"missing tensor '{name}.{part}': check that all weight files are there.")
    (out, size), shapes = layer.shapes(config, {part: tensor.shape for part, tensor in parts.items()})
    for part, tensor in parts.items():
        if tensor.shape != shapes[part] or not math.prod(tensor.shape):
            raise StartupError(
                f"tensor '{name}.{part}' has shape {tensor.shape}, but {config.bits} bits in groups of "
                f"{config.group_size or size} of {size} inputs need {shapes[part]}: the checkpoint does not fit its "
                "quantization_config; download it again."
            )
        if tensor.dtype not in layer.types[part]:
            raise StartupError(
                f"tensor '{name}.{part}' has the type {tensor.dtype}, {config.layout} needs "
                f"{' or '.join(layer.types[part])}: download the checkpoint again."
            )
    num_bytes = sum(tensor.num_bytes for tensor in parts.values())
    return QuantisedLayer(name=name, config=config, shape=(out, size), parts=frozenset(parts), num_bytes=num_bytes)


def iter_quantised(
    layers: Mapping[str, QuantisedLayer],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None,
    blocks: Container[str],
) -> Iterator[tuple[str, Tensor | QuantisedTensor]]:
    """Yield each layer's weight once all of its parts were read, as blocks if its name is in `blocks`."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for given, tensor in tensors:
        prefix, _, part = given.rpartition(".")
        name = f"{prefix}.weight"
        if name not in layers or part not in layers[name].parts:
            yield given, tensor
            continue
        parts = waiting.setdefault(name, {})
        parts[part] = tensor
        if parts.keys() == layers[name].parts:
            del waiting[name]
            unpacked = _Unpacked(layers[name], parts)
            yield name, unpacked.blocks() if name in blocks else unpacked.expanded(dtype or torch.float32)
            del unpacked
        del parts, tensor  # before the next one is read


class _Unpacked:
    """A layer, of which a slice of outputs is unpacked at a time."""

    def __init__(self, layer: QuantisedLayer, parts: Mapping[str, Tensor]) -> None:
        self.layer = layer
        self.format = FORMATS[layer.config.layout]
        self.tensors = self.format.read(layer.config, parts)
        self.scales, self.zeros = self.tensors.scales, self.tensors.zeros
        given = self.tensors.groups
        self.groups = torch.arange(layer.shape[1]) // layer.group_size if given is None else given
        if self.tensors.shape not in (None, layer.shape):
            what = f"the shape is {self.tensors.shape}, but the packed weight has {layer.shape}"
            raise self._error("weight_shape", what, "download the checkpoint again")
        self._check_groups()
        if not self.scales.isfinite().all():
            row = int((~self.scales.isfinite()).any(1).nonzero()[0])
            raise self._error(
                self.format.scales, f"output {row} has an infinite or NaN scale", "download the checkpoint again"
            )

    def blocks(self) -> QuantisedTensor:
        layer = self.layer
        assert layer.type is not None, "only a layer with a type is asked for its blocks"
        block_format = QUANTISED_FORMATS[layer.type.name]
        order = self._order()
        groups = (self.groups if order is None else self.groups[order])[::_BLOCK]
        self._check_zeros()
        scales = self._exact_scales()
        out, size = layer.shape
        rows = fresh_tensor((out, size // _BLOCK * block_format.num_bytes), torch.uint8)
        with single_thread():
            for part in self._slices():
                codes = self.tensors.unpack(part)
                codes = codes if order is None else codes[:, order]
                signed = codes.reshape(len(codes), -1, _BLOCK) - self.zeros[part, groups].unsqueeze(-1)
                rows[part] = signed_blocks(signed.to(torch.int8), scales[part, groups], block_format)
        return QuantisedTensor(block_format, rows, order)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        out = fresh_tensor(self.layer.shape, dtype)
        with single_thread():
            for part in self._slices():
                signed = self.tensors.unpack(part) - self.zeros[part][:, self.groups]
                out[part] = (self.scales[part].float()[:, self.groups] * signed).to(dtype)
        return out

    def _slices(self) -> Iterator[slice]:
        out = self.layer.shape[0]
        return (slice(first, min(first + _OUTPUTS, out)) for first in range(0, out, _OUTPUTS))

    def _order(self) -> Tensor | None:
        """Return the order of the inputs by group; None if it is that of the checkpoint."""
        order = None if bool((self.groups.diff() >= 0).all()) else self.groups.argsort(stable=True)
        counts = self.groups.bincount(minlength=self.layer.num_groups)
        if bool((counts % _BLOCK != 0).any()):
            group = int((counts % _BLOCK != 0).nonzero()[0])
            what = f"group {group} has {int(counts[group])} inputs, which are no multiple of {_BLOCK}"
            raise self._error(self.format.groups, what, "use --dtype float32, which expands the weights")
        return order

    def _exact_scales(self) -> Tensor:
        """Return the scales in fp16, the type that blocks have."""
        exact = self.scales.half()
        if not torch.equal(exact.to(self.scales.dtype), self.scales):
            value = self.scales[exact.to(self.scales.dtype) != self.scales][0].item()
            raise self._error(
                self.format.scales, f"{value} is no fp16 number", "use --dtype float32, which expands the weights"
            )
        return exact

    def _check_zeros(self) -> None:
        zero = 1 << (self.layer.config.bits - 1)
        if self.layer.config.symmetric and not bool((self.zeros == zero).all()):
            value = int(self.zeros[self.zeros != zero][0])
            remedy = "correct `sym`, `zero_point` or `symmetric` in the quantization_config of a copy"
            raise self._error(self.format.zeros, f"a zero point is {value}, but symmetric weights have {zero}", remedy)

    def _check_groups(self) -> None:
        low, high = int(self.groups.min()), int(self.groups.max())
        if low < 0 or high >= self.layer.num_groups:
            what = f"an input has the group {low if low < 0 else high}, of {self.layer.num_groups} groups"
            raise self._error(self.format.groups, what, "download the checkpoint again")

    def _error(self, part: str, what: str, remedy: str) -> StartupError:
        return StartupError(f"tensor '{self.layer.name}.{part}': {what}: {remedy}.")


def signed_blocks(
    values: Int8[Tensor, "out blocks 32"], scales: Float16[Tensor, "out blocks"], block_format: QuantisedFormat
) -> UInt8[Tensor, "out row_bytes"]:
    """Return rows of blocks. Values are in [-8, 7] for Q4_0, in [-16, 15] for Q5_0."""
    parts = [scales.contiguous().view(torch.uint8).view(*scales.shape, 2)]
    if block_format.name == "Q8_0":
        parts.append(values.view(torch.uint8))
    else:
        codes = (values + (8 if block_format.name == "Q4_0" else 16)).view(torch.uint8)
        if block_format.name == "Q5_0":
            powers = 2 ** torch.arange(8, dtype=torch.uint8)
            parts.append(((codes >> 4).view(*scales.shape, 4, 8) * powers).sum(-1, dtype=torch.uint8))
        low = codes & 15
        parts.append(low[..., :16] | low[..., 16:] << 4)
    return torch.cat(parts, -1).flatten(1)
