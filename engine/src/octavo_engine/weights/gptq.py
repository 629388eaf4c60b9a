"""Reads the layers of GPTQ checkpoints: as blocks of GGUF's types without any rounding, or expanded.

A layer is `qweight` (packed along the inputs), `qzeros` (packed along the outputs), `scales`, and perhaps `g_idx`, the
group of each input. A weight is scale * (code - zero), so 4 bits with a zero point of 8 are Q4_0's blocks, other zero
points give signed numbers of 5 bits (Q5_0), and 8 bits with 128 are Q8_0's. The scale of a group is repeated in its
blocks. If groups mix inputs (act-order), the inputs are sorted by group, and the layer gathers them in this order.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_engine.ops.native_blocks import BLOCK_FORMATS, BlockTensor
from octavo_engine.ops.signed_blocks import signed_blocks
from octavo_engine.ops.single_thread import single_thread
from octavo_engine.sources.gguf_types import GGMLType
from octavo_engine.sources.gptq_config import GPTQConfig
from octavo_engine.sources.safetensors_header import SafeTensor
from octavo_engine.weights.fresh_memory import fresh_tensor
from octavo_engine.wire.errors import StartupError

_REQUIRED = ("qweight", "qzeros", "scales")
_PARTS = (*_REQUIRED, "g_idx")
_BLOCK = 32
#: Outputs that are unpacked at a time.
_OUTPUTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQLayer:
    """A layer by its header. `parts`: names of its tensors in the checkpoint, without the layer's name."""

    name: str
    config: GPTQConfig
    shape: tuple[int, int]
    num_groups: int
    parts: frozenset[str]
    num_bytes: int

    @property
    def group_size(self) -> int:
        return self.config.group_size or self.shape[1]

    @property
    def type(self) -> GGMLType:
        """The blocks in which the layer can stay, or a name of what has none."""
        bits, whole = self.config.bits, self.group_size % _BLOCK == 0
        name = {(4, True): "Q4_0", (4, False): "Q5_0", (8, True): "Q8_0"}.get((bits, self.config.symmetric))
        if name is None or not whole:
            zeros = "" if self.config.symmetric else " with zero points"
            return GGMLType(-1, f"GPTQ of {bits} bits in groups of {self.group_size}{zeros}", _BLOCK, 0)
        return GGMLType(-1, name, _BLOCK, BLOCK_FORMATS[name].num_bytes)


def gptq_layers(config: GPTQConfig, headers: Mapping[str, SafeTensor]) -> dict[str, GPTQLayer]:
    """Return the layers by the names of their weights. Raises StartupError for missing parts and wrong shapes."""
    found: dict[str, dict[str, SafeTensor]] = {}
    for name, tensor in headers.items():
        layer, _, part = name.rpartition(".")
        if part in _PARTS:
            found.setdefault(layer, {})[part] = tensor
    return {f"{layer}.weight": _checked(layer, config, parts) for layer, parts in found.items()}


def _checked(name: str, config: GPTQConfig, parts: dict[str, SafeTensor]) -> GPTQLayer:
    for part in _REQUIRED:
        if part not in parts:
            raise StartupError(f"missing tensor '{name}.{part}': check that all weight files are there.")
    per_int = 32 // config.bits
    rows, out = (*parts["qweight"].shape, 0)[:2]
    size = rows * per_int
    num_groups = -(-size // (config.group_size or max(size, 1)))
    shapes = {"qweight": (rows, out), "qzeros": (num_groups, out // per_int), "scales": (num_groups, out)}
    for part, shape in {**shapes, "g_idx": (size,)}.items():
        if part in parts and parts[part].shape != shape:
            raise StartupError(
                f"tensor '{name}.{part}' has shape {parts[part].shape}, but {config.bits} bits in groups of "
                f"{config.group_size or size} of {size} inputs need {shape}: the checkpoint does not fit its "
                "quantization_config; download it again."
            )
        expected = ("F16", "BF16", "F32") if part == "scales" else ("I32",) if part != "g_idx" else ("I32", "I64")
        if part in parts and parts[part].dtype not in expected:
            raise StartupError(
                f"tensor '{name}.{part}' has the type {parts[part].dtype}, GPTQ needs {' or '.join(expected)}: "
                "download the checkpoint again."
            )
    num_bytes = sum(parts[part].num_bytes for part in parts)
    return GPTQLayer(
        name=name, config=config, shape=(out, size), num_groups=num_groups, parts=frozenset(parts), num_bytes=num_bytes
    )


def iter_gptq(
    layers: Mapping[str, GPTQLayer],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None,
    blocks: Container[str],
) -> Iterator[tuple[str, Tensor | BlockTensor]]:
    """Yield each layer's weight once all of its parts were read, as blocks if its name is in `blocks`."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for given, tensor in tensors:
        layer, _, part = given.rpartition(".")
        name = f"{layer}.weight"
        if part not in _PARTS:
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
    """A layer's codes, of which a slice of outputs is unpacked at a time."""

    def __init__(self, layer: GPTQLayer, parts: Mapping[str, Tensor]) -> None:
        self.layer, self.packed = layer, parts["qweight"]
        size = layer.shape[1]
        self.scales = parts["scales"].t()  # [out, groups]
        self.zeros = _codes(parts["qzeros"].contiguous(), layer.config.bits).t() + layer.config.zero_offset
        default = torch.arange(size) // layer.group_size
        self.groups = parts["g_idx"].long() if "g_idx" in parts else default
        self._check_groups()
        if not self.scales.isfinite().all():
            row = int((~self.scales.isfinite()).any(1).nonzero()[0])
            raise self._error("scales", f"output {row} has an infinite or NaN scale", "download the checkpoint again")

    def blocks(self) -> BlockTensor:
        layer, config = self.layer, self.layer.config
        block_format = BLOCK_FORMATS[layer.type.name]
        order = self._order()
        groups = (self.groups if order is None else self.groups[order])[::_BLOCK]
        exact = self.scales.half()
        if not torch.equal(exact.to(self.scales.dtype), self.scales):
            value = self.scales[exact.to(self.scales.dtype) != self.scales][0].item()
            raise self._error("scales", f"{value} is no fp16 number", "use --dtype float32, which expands the weights")
        zero = 1 << (config.bits - 1)
        if config.symmetric and not bool((self.zeros == zero).all()):
            value = int(self.zeros[self.zeros != zero][0])
            remedy = 'set "sym" to false in the quantization_config of a copy'
            raise self._error("qzeros", f"a zero point is {value}, but {zero} is expected of sym=true", remedy)
        out, size = layer.shape
        rows = fresh_tensor((out, size // _BLOCK * block_format.num_bytes), torch.uint8)
        with single_thread():
            for part in self._slices():
                codes = self._unpack(part) if order is None else self._unpack(part)[:, order]
                signed = codes.view(len(codes), -1, _BLOCK) - self.zeros[part, groups].unsqueeze(-1)
                rows[part] = signed_blocks(signed.to(torch.int8), exact[part, groups], block_format)
        return BlockTensor(block_format, rows, order)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        out = fresh_tensor(self.layer.shape, dtype)
        with single_thread():
            for part in self._slices():
                signed = self._unpack(part) - self.zeros[part][:, self.groups]
                out[part] = (self.scales[part].float()[:, self.groups] * signed).to(dtype)
        return out

    def _slices(self) -> Iterator[slice]:
        return (slice(first, first + _OUTPUTS) for first in range(0, self.layer.shape[0], _OUTPUTS))

    def _unpack(self, part: slice) -> Tensor:
        """Return the codes [outputs, inputs] as int16."""
        return _codes(self.packed[:, part].t().contiguous(), self.layer.config.bits)

    def _order(self) -> Tensor | None:
        """Return the order of the inputs by group; None if it is that of the checkpoint."""
        order = None if bool((self.groups.diff() >= 0).all()) else self.groups.argsort(stable=True)
        counts = self.groups.bincount(minlength=self.layer.num_groups)
        if bool((counts % _BLOCK != 0).any()):
            group = int((counts % _BLOCK != 0).nonzero()[0])
            what = f"group {group} has {int(counts[group])} inputs, which are no multiple of {_BLOCK}"
            raise self._error("g_idx", what, "use --dtype float32, which expands the weights")
        return order

    def _check_groups(self) -> None:
        low, high = int(self.groups.min()), int(self.groups.max())
        if low < 0 or high >= self.layer.num_groups:
            what = f"an input has the group {low if low < 0 else high}, of {self.layer.num_groups} groups"
            raise self._error("g_idx", what, "download the checkpoint again")

    def _error(self, part: str, what: str, remedy: str) -> StartupError:
        return StartupError(f"tensor '{self.layer.name}.{part}': {what}: {remedy}.")


def _codes(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of packed rows [rows, columns * 32 / bits] as int16; the lowest bits are the first code."""
    octets = packed.view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    return octets.to(torch.int16)
