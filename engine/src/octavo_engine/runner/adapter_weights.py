"""Reads an adapter's tensors, hashes them, and packs them as terms of the model's linear layers."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.models.model import Model
from octavo_engine.ops.packed_linear import PackedWeight, pack, small_linear
from octavo_engine.runner.adapter_targets import AdapterTargets, Target
from octavo_engine.sources.adapter import AdapterFiles, AdapterModule
from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.weights.safetensors_file import iter_safetensors, tensor_of_bytes

_LABEL = b"octavo-adapter1"


@dataclass(frozen=True, slots=True)
class LayerTerm:
    """One adapter's term of one layer, or the part of it that follows the layer's shard. `down`: the A of all parts.
    `ups`: for each part, the columns of `down`'s output and a B that includes the scale; None: the part has no term.
    """

    down: PackedWeight
    ups: tuple[tuple[slice, PackedWeight] | None, ...]

    def add(self, x: Tensor, parts: Sequence[Tensor]) -> None:
        low = small_linear(x, self.down)
        for up, part in zip(self.ups, parts, strict=True):
            if up is not None:
                columns, weight = up
                part.add_(small_linear(low[:, columns].contiguous(), weight))


Terms = Mapping[Linear, LayerTerm]


def read_tensors(files: AdapterFiles, advance: Advance = ignore_progress) -> dict[str, Tensor]:
    return dict(iter_safetensors(files.tensors_file, advance=advance))


def bytes_of_tensors(tensors: Mapping[str, Tensor]) -> dict[str, bytearray]:
    return {name: bytearray(_view_bytes(tensor)) for name, tensor in tensors.items()}


def tensors_of_bytes(files: AdapterFiles, raw: Mapping[str, bytearray]) -> dict[str, Tensor]:
    """Return the tensors of an adapter from the result of `bytes_of_tensors`."""
    infos = [info for module in files.modules.values() for info in (module.a, module.b)]
    return {info.name: tensor_of_bytes(torch.frombuffer(raw[info.name], dtype=torch.uint8), info) for info in infos}


def make_terms(files: AdapterFiles, tensors: Mapping[str, Tensor], model: Model, *, max_rank: int) -> Terms:
    """Pack tensors as terms of a model. Raises StartupError."""
    modules = AdapterTargets(model).match(files, max_rank=max_rank)
    by_layer: dict[Linear, dict[Target, AdapterModule]] = {}
    for target, module in modules.items():
        by_layer.setdefault(target.linear, {})[target] = module
    return {linear: _pack_term(files, linear, found, tensors, model.build) for linear, found in by_layer.items()}


def _pack_term(
    files: AdapterFiles,
    linear: Linear,
    modules: Mapping[Target, AdapterModule],
    tensors: Mapping[str, Tensor],
    build: BuildContext,
) -> LayerTerm:
    def convert(name: str, scale: float = 1.0) -> Tensor:
        tensor = (tensors[name].float() * scale).to(device=build.device, dtype=build.dtype)
        if not torch.isfinite(tensor).all():
            raise files.error(
                f"tensor '{name}' has values that are not finite in {str(build.dtype).removeprefix('torch.')}: train "
                "the adapter again, or use --dtype float32."
            )
        return tensor

    shard = linear.spec.shard
    ups: list[tuple[slice, PackedWeight] | None] = [None] * len(linear.spec.outs)
    bounds = pairwise(accumulate((module.rank for module in modules.values()), initial=0))
    for (target, module), (first, end) in zip(modules.items(), bounds, strict=True):
        parts = convert(module.b.name, module.scale).split_with_sizes(target.outs)
        for part, b in enumerate(parts, target.first):
            outputs = shard.outputs(part, len(b))
            ups[part] = slice(first, end), pack(b[outputs.start : outputs.stop])
    down = torch.cat([shard.cut_inputs(convert(module.a.name)) for module in modules.values()])
    return LayerTerm(pack(down), tuple(ups))


def content_hash(files: AdapterFiles, tensors: Mapping[str, Tensor]) -> str:
    """Hash everything that the terms depend on: names, scales and tensors, and neither paths nor other settings."""
    digest = hashlib.sha256(_LABEL)
    for name, module in sorted(files.modules.items()):
        _add(digest, name.encode())
        _add(digest, struct.pack("<d", module.scale))
        for info in (module.a, module.b):
            _add(digest, info.dtype.encode())
            _add(digest, struct.pack("<2Q", *info.shape))
            _add(digest, _view_bytes(tensors[info.name]))
    return digest.hexdigest()


def _view_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _add(digest: "hashlib._Hash", part: bytes | memoryview) -> None:
    """Add a part with its length, so that different lists of parts never give the same bytes."""
    digest.update(len(part).to_bytes(8, "little") if isinstance(part, bytes) else part.nbytes.to_bytes(8, "little"))
    digest.update(part)
