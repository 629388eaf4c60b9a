"""Reads the layers of quantised checkpoints: as groups or blocks without any rounding, or expanded.

Groups keep codes and scales as they are. Blocks of GGUF hold integers: a weight is scale * (code - zero point). 4-bit
codes with a zero point of 8 become Q4_0; other zero points give signed 5-bit numbers, Q5_0; 8-bit codes with 128 become
Q8_0. A group's scale is repeated in its blocks. If groups are not consecutive inputs (act-order), inputs are sorted by
group, and the layer gathers its input in this order.
"""

import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from jaxtyping import Float16, Int8, UInt8
from torch import Tensor

from octavo_engine.ops.group_tensor import CODE_BLOCK, Codes, GroupFormat, GroupTensor, pack_nibbles
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS, QuantisedFormat, QuantisedTensor
from octavo_engine.ops.single_thread import single_thread
from octavo_engine.sources.gguf_header import GGML_TYPES, GGMLType
from octavo_engine.sources.quantised_config import QuantisedConfig
from octavo_engine.sources.safetensors_header import SafeTensor
from octavo_engine.weights.awq import AWQ
from octavo_engine.weights.bitsandbytes import BITSANDBYTES_FORMATS
from octavo_engine.weights.compressed_tensors import INT_QUANTIZED, PACK_QUANTIZED
from octavo_engine.weights.fp8 import FP8_FORMATS
from octavo_engine.weights.fresh_memory import fresh_tensor
from octavo_engine.weights.gptq import GPTQ
from octavo_engine.weights.layer_format import FLOATS, BadPartError, LayerFormat
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)

#: Layout -> formats, which differ in the names of the scales.
FORMATS: dict[str, tuple[LayerFormat, ...]] = {
    "gptq": (GPTQ,),
    "awq": (AWQ,),
    "pack-quantized": (PACK_QUANTIZED,),
    "int-quantized": (INT_QUANTIZED,),
    "float-quantized": FP8_FORMATS,
    **BITSANDBYTES_FORMATS,
}
#: (bits, whether all zero points are equal) -> GGUF type of the blocks that can hold such weights.
_TYPES = {(4, True): GGML_TYPES[2], (4, False): GGML_TYPES[6], (8, True): GGML_TYPES[8]}
_BLOCK = 32
#: Name of a `LayerFormat`'s codes -> codes of a group format; `_INTEGERS` lists integer codes.
_GROUP_CODES: dict[str, Codes] = {"e4m3": "e4m3", "nf4": "table4", "fp4": "table4", "int8": "int8"}
_INTEGERS: dict[tuple[int, bool], Codes] = {(4, True): "int4", (4, False): "int4", (8, True): "int8"}
_SCALE_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
#: Number of weights to unpack at a time, which fit into a core's cache; number of outputs that AWQ packs together.
_SLICE, _OUTPUTS = 2**18, 8
#: A product with this number collects the lowest bits of eight bytes in the highest byte.
_SHIFTED_ONES = 0x0102040810204080
#: Dtypes of tensors that need no scales.
_UNSCALED = (*FLOATS, "F64")
#: The last parts of the names of tensors for a quantised KV cache.
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "k_zero_point", "v_zero_point")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLayer:
    """A layer, as its header describes it. `parts`: names of its tensors, without the layer's name.

    `scale_type`: dtype of the scales in the file. `has_exact_scales`: returns whether blocks, whose scales are fp16,
    can hold the scales exactly. `has_order`: returns whether groups are not consecutive inputs. `read_shape`: returns
    shape and group size, if only a tensor has them.
    """

    name: str
    config: QuantisedConfig
    format: LayerFormat
    shape: tuple[int, int]
    parts: frozenset[str]
    num_bytes: int
    scale_type: str = "F32"
    has_exact_scales: Callable[[], bool] = lambda: True
    has_order: Callable[[], bool] = lambda: False
    read_shape: Callable[[], tuple[tuple[int, int], int]] | None = None

    @property
    def group_size(self) -> int:
        return min(self.config.group_size or self.shape[1], self.shape[1])

    @property
    def type(self) -> GGMLType | None:
        block_type = _TYPES.get((self.config.bits, self.config.symmetric))
        if block_type is None or self.format.codes != "int" or self.group_size % _BLOCK:
            return None
        return block_type if self.has_exact_scales() else None

    @property
    def group_format(self) -> GroupFormat | None:
        """The format for `_Unpacked.grouped`; None unless rows are whole groups of a multiple of 32 inputs."""
        integers, config = self.format.codes == "int", self.config
        codes = _INTEGERS.get((config.bits, config.symmetric)) if integers else _GROUP_CODES[self.format.codes]
        (_, size), group_size = (self.shape, self.group_size) if self.read_shape is None else self.read_shape()
        if codes is None or group_size % CODE_BLOCK or size % group_size:
            return None
        return GroupFormat(
            name=codes if integers else self.format.codes,
            codes=codes,
            group_size=group_size,
            scale_dtype=_SCALE_DTYPES.get(self.scale_type, torch.float32) if integers else torch.float32,
            offsets="zeros" if integers and not config.symmetric else "none",
            rounds_inputs=codes == "e4m3" and config.activation_bits == 8,
        )

    @property
    def format_name(self) -> str:
        if self.format.codes != "int":
            return f"{self.config.method} in {self.format.codes}"
        zeros = "" if self.config.symmetric else " with zero points"
        scales = "" if self.has_exact_scales() else " with scales that are no fp16 numbers"
        return f"{self.config.method} of {self.config.bits} bits in groups of {self.group_size}{zeros}{scales}"


def quantised_layers(
    config: QuantisedConfig, headers: Mapping[str, SafeTensor], read: Callable[[str], Tensor] | None = None
) -> dict[str, QuantisedLayer]:
    """Return the layers by the names of their weights. `read`: reads a tensor. None: assume that blocks can hold all
    scales, and that groups are consecutive inputs.

    Raises StartupError for missing parts and wrong shapes.
    """
    formats = FORMATS[config.layout]
    layers: dict[str, dict[str, SafeTensor]] = {}
    for name, tensor in headers.items():
        place = next((place for each in formats if (place := each.split(name)) is not None), None)
        if place is not None:
            layers.setdefault(place[0], {})[place[1]] = tensor
        elif tensor.dtype.startswith("F8"):
            raise StartupError(
                f"tensor '{name}' of the type {tensor.dtype} has no scales: only weights of linear layers may be "
                "quantised; use another checkpoint."
            )
    quantised = {name: parts for name, parts in layers.items() if _is_quantised(parts)}
    known = {part for parts in quantised.values() for part in parts}
    usual = next((each for each in formats if each.scales in known), formats[0])  # errors name its scales
    found = {f"{name}.weight": _checked(name, config, parts, usual) for name, parts in quantised.items()}
    if read is None:
        return found
    for name, layer in found.items():
        if layer.format.groups in layer.parts:
            groups = f"{layer.name}.{layer.format.groups}"
            layer = found[name] = replace(layer, has_order=cache(partial(_is_mixed, read, groups)))
        if layer.format.codes == "int" and layer.scale_type != "F16":
            scales = f"{layer.name}.{layer.format.scales}"
            found[name] = replace(layer, has_exact_scales=cache(partial(_are_exact, read, scales)))
        elif layer.format.layer_shape is not None:
            found[name] = replace(layer, read_shape=cache(partial(_read_shape, read, layer)))
    return found


def _read_shape(read: Callable[[str], Tensor], layer: QuantisedLayer) -> tuple[tuple[int, int], int]:
    assert layer.format.layer_shape is not None
    try:
        return layer.format.layer_shape(read(f"{layer.name}.{layer.format.shaped_by}"))
    except BadPartError:  # it ends the start later, when the layer is loaded
        return layer.shape, layer.group_size


def _are_exact(read: Callable[[str], Tensor], name: str) -> bool:
    scales = read(name)
    return torch.equal(scales.half().to(scales.dtype), scales)


def _is_mixed(read: Callable[[str], Tensor], name: str) -> bool:
    groups = read(name)
    return bool((groups >= 0).all()) and not _is_sorted(groups)


def _is_sorted(groups: Tensor) -> bool:
    return bool((groups.diff() >= 0).all())


def _is_quantised(parts: Mapping[str, SafeTensor]) -> bool:
    return parts.keys() != {"weight"} or parts["weight"].dtype not in _UNSCALED


def log_settings(config: QuantisedConfig, names: Iterable[str]) -> None:
    """Warn if no tensor matches the list of unquantised layers; log if the checkpoint was made for a quantised KV
    cache."""
    known = [*names, "lm_head."]  # a tied head has no tensor
    if config.ignored and not any(part.startswith("re:") or part in name for part in config.ignored for name in known):
        _LOGGER.warning("quantization_config: no tensor has a name with one of %s", ", ".join(config.ignored))
    if config.quantised_cache:
        _LOGGER.info("the checkpoint was made for a quantised KV cache (kv_cache_scheme); see --kv-cache-dtype")


def _checked(name: str, config: QuantisedConfig, parts: dict[str, SafeTensor], usual: LayerFormat) -> QuantisedLayer:
    layer = next((each for each in FORMATS[config.layout] if each.scales in parts), usual)
    parts = {part: tensor for part, tensor in parts.items() if part in layer.types}
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
                f"{' or '.join(layer.types[part])}: use another checkpoint, or download it again."
            )
    return QuantisedLayer(
        name=name,
        config=config,
        format=layer,
        shape=(out, size),
        parts=frozenset(parts),
        num_bytes=sum(tensor.num_bytes for tensor in parts.values()),
        scale_type=parts[layer.scales].dtype,
    )


def iter_quantised(
    layers: Mapping[str, QuantisedLayer],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None,
    blocks: Container[str],
    groups: Container[str] = (),
) -> Iterator[tuple[str, Tensor | QuantisedTensor | GroupTensor]]:
    """Yield each layer's weight once its parts are read, in blocks or groups if `blocks` or `groups` lists it."""
    names = {f"{layer.name}.{part}": name for name, layer in layers.items() for part in layer.parts}
    waiting: dict[str, dict[str, Tensor]] = {}
    for given, tensor in tensors:
        name = names.get(given)
        if name is None:
            if given.rpartition(".")[2] not in _CACHE_SCALES:
                yield given, tensor
            continue
        parts = waiting.setdefault(name, {})
        parts[given.removeprefix(f"{layers[name].name}.")] = tensor
        if parts.keys() == layers[name].parts:
            del waiting[name]
            unpacked = _Unpacked(layers[name], parts)
            if name in groups:
                yield name, unpacked.grouped()
            else:
                yield name, unpacked.blocks() if name in blocks else unpacked.expanded(dtype or torch.float32)
            del unpacked
        del parts, tensor  # before the next one is read


class _Unpacked:
    """A layer that is unpacked a slice of outputs at a time."""

    def __init__(self, layer: QuantisedLayer, parts: Mapping[str, Tensor]) -> None:
        self.layer = layer
        self.format = layer.format
        with self._named_errors():
            self.tensors = self.format.read(layer.config, parts)
        self.scales, self.zeros, given = self.tensors.scales, self.tensors.zeros, self.tensors.groups
        self.shape = self.tensors.shape or layer.shape
        self.group_size = self.tensors.group_size or layer.group_size
        in_order = torch.arange(self.shape[1]) // self.group_size
        self.groups = in_order if given is None else given
        self.is_regular = self.shape[1] % self.group_size == 0 and torch.equal(self.groups, in_order)
        self._check_groups()
        if not self.scales.isfinite().all():
            row = int((~self.scales.isfinite()).any(1).nonzero()[0])
            raise self._error(
                self.format.scales, f"output {row} has an infinite or NaN scale", "download the checkpoint again"
            )

    def blocks(self) -> QuantisedTensor:
        layer = self.layer
        assert layer.type is not None, "only a layer with a type is asked for its blocks"
        assert self.zeros is not None, "integers have zero points"
        block_format = QUANTISED_FORMATS[layer.type.name]
        order = self._order(_BLOCK)
        groups = (self.groups if order is None else self.groups[order])[::_BLOCK]
        self._check_zeros(self.zeros)
        scales = self.scales.half()
        out, size = layer.shape
        rows = fresh_tensor((out, size // _BLOCK * block_format.num_bytes), torch.uint8)
        with single_thread():
            for part in self._slices():
                codes = _in_order(self.tensors.unpack(part), order)
                signed = codes.view(len(codes), -1, _BLOCK) - self.zeros[part, groups].unsqueeze(-1)  # modulo 256
                rows[part] = signed_blocks(signed.view(torch.int8), scales[part, groups], block_format)
        return QuantisedTensor(block_format, rows, order)

    def grouped(self) -> GroupTensor:
        kept = self.layer.group_format
        assert kept is not None, "only a layer with such a format is asked for its groups"
        order = self._order(kept.group_size)
        groups = (self.groups if order is None else self.groups[order])[:: kept.group_size]
        if self.zeros is not None:
            self._check_zeros(self.zeros)
        out, size = self.shape
        rows = fresh_tensor((out, size // kept.codes_per_byte), torch.uint8)
        with single_thread(), self._named_errors():
            for part in self._slices():
                codes = _in_order((self.tensors.codes or self.tensors.unpack)(part), order)
                if kept.codes == "int8":
                    codes = codes.view(torch.uint8) if self.zeros is None else codes ^ 128
                rows[part] = codes if kept.codes_per_byte == 1 else pack_nibbles(codes)
        scales = self.scales if self.tensors.factor == 1.0 else self.scales.float() * self.tensors.factor
        zeros = self.zeros if kept.offsets == "zeros" else None
        return GroupTensor(
            format=kept,
            codes=rows,
            scales=scales[:, groups].t().to(kept.scale_dtype).contiguous(),
            offsets=None if zeros is None else zeros[:, groups].t().contiguous(),
            table=self.tensors.table,
            order=order,
            input_scale=self.tensors.input_scale,
        )

    def expanded(self, dtype: torch.dtype) -> Tensor:
        out = fresh_tensor(self.shape, dtype)
        with single_thread(), self._named_errors():
            for part in self._slices():
                values = self.tensors.unpack(part).float()
                if self.is_regular:
                    values = values.view(len(values), -1, self.group_size)
                if self.zeros is not None:
                    values.sub_(self._by_input(self.zeros[part]))
                values.mul_(self._by_input(self.scales[part]))
                values = values if self.tensors.factor == 1.0 else values.mul_(self.tensors.factor)
                out[part] = values.view(len(values), -1)
        return out

    def _by_input(self, values: Tensor) -> Tensor:
        """Return values [outputs, groups] in fp32, in a shape that broadcasts over a group's inputs."""
        values = values.contiguous().float()
        return values.unsqueeze(-1) if self.is_regular else values.index_select(1, self.groups)

    def _slices(self) -> Iterator[slice]:
        out, size = self.shape
        count = max(_SLICE // size // _OUTPUTS, 1) * _OUTPUTS
        return (slice(first, min(first + count, out)) for first in range(0, out, count))

    def _order(self, unit: int) -> Tensor | None:
        """Return the inputs' order by group; None: they are sorted already. `unit`: number of inputs that share a scale
        in memory."""
        order = None if _is_sorted(self.groups) else self.groups.argsort(stable=True)
        counts = self.groups.bincount()
        if bool((counts % unit != 0).any()):
            group = int((counts % unit != 0).nonzero()[0])
            what = f"group {group} has {int(counts[group])} inputs, which are no multiple of {unit}"
            raise self._error(self.format.groups, what, "use --dtype float32, which expands the weights")
        return order

    def _check_zeros(self, zeros: Tensor) -> None:
        zero = 1 << (self.layer.config.bits - 1)
        if self.layer.config.symmetric and not bool((zeros == zero).all()):
            value = int(zeros[zeros != zero][0])
            remedy = "correct `sym`, `zero_point` or `symmetric` in the quantization_config of a copy"
            raise self._error(self.format.zeros, f"a zero point is {value}, but symmetric weights have {zero}", remedy)

    def _check_groups(self) -> None:
        low, high, count = int(self.groups.min()), int(self.groups.max()), self.scales.shape[1]
        if low < 0 or high >= count:
            what = f"an input has the group {low if low < 0 else high}, but there are {count} groups"
            raise self._error(self.format.groups, what, "download the checkpoint again")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except BadPartError as error:
            raise self._error(error.part, error.what, error.remedy) from error

    def _error(self, part: str, what: str, remedy: str) -> StartupError:
        return StartupError(f"tensor '{self.layer.name}.{part}': {what}: {remedy}.")


def _in_order(codes: Tensor, order: Tensor | None) -> Tensor:
    return codes if order is None else codes.gather(1, order.expand(len(codes), -1))


def signed_blocks(
    values: Int8[Tensor, "out blocks 32"], scales: Float16[Tensor, "out blocks"], block_format: QuantisedFormat
) -> UInt8[Tensor, "out row_bytes"]:
    """Return rows packed in blocks. Values must be in [-8, 7] for Q4_0, and in [-16, 15] for Q5_0."""
    parts = [scales.contiguous().view(torch.uint8).view(*scales.shape, 2)]
    if block_format.name == "Q8_0":
        parts.append(values.view(torch.uint8))
    else:
        codes = (values + (8 if block_format.name == "Q4_0" else 16)).view(torch.uint8)
        if block_format.name == "Q5_0":
            eights = (codes >> 4).contiguous().view(torch.int64)
            parts.append((eights * _SHIFTED_ONES >> 56).to(torch.uint8))
        parts.append(pack_nibbles((codes & 15).flatten(1)).view(*scales.shape, 16))
    return torch.cat(parts, -1).flatten(1)
