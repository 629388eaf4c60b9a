"""Reads and hashes an adapter's tensors; packs them as low-rank terms of the linear layers that they change.

It checks whether the tensors suit the layers, and plans the memory of adapters.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from octavo_engine.devices.device import Device
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.moe import Experts
from octavo_engine.models.model import Model
from octavo_engine.ops.packed_linear import PackedWeight, pack, small_linear
from octavo_engine.settings.config import EngineConfig, adapters_in_memory
from octavo_engine.sources.adapter import AdapterFiles, AdapterModule, read_adapter
from octavo_engine.sources.progress import Advance, ignore_progress
from octavo_engine.weights.safetensors_file import iter_safetensors, tensor_of_bytes

_LABEL = b"octavo-adapter1"
_PANEL = 32  # our kernel pads both sizes of a weight to multiples of it


@dataclass(frozen=True, slots=True)
class Target:
    """The layer that computes a checkpoint's module, as output parts [`first`, `end`)."""

    linear: Linear
    first: int
    end: int

    @property
    def outs(self) -> tuple[int, ...]:
        return self.linear.spec.outs[self.first : self.end]


class AdapterTargets:
    """The linear layers that adapters may change, by module name; adapters may also name modules of other stages."""

    def __init__(self, model: Model) -> None:
        self._prefix, self._renamed, self._targets = model.base_prefix, model.renamed, dict(_find_targets(model))
        self._all = (
            self._targets if model.build.stages.size == 1 else dict(_find_targets(model.whole())) | self._targets
        )

    def __iter__(self) -> Iterator[Linear]:
        return iter(dict.fromkeys(target.linear for target in self._targets.values()))

    def of_module(self, name: str) -> Target | None:
        """Return the target of a module. Adapters of a model without its head omit a prefix of the names."""
        name = self._renamed(f"{name}.weight").removesuffix(".weight")
        return self._all.get(name) or self._all.get(self._prefix + name)

    def match(self, files: AdapterFiles, *, max_rank: int) -> dict[Target, AdapterModule]:
        """Return an adapter's modules by target, including layers of other stages.

        Raises StartupError for an adapter of another model, or of a rank above the limit.
        """
        files.check_rank(max_rank)
        modules: dict[Target, AdapterModule] = {}
        for module in files.modules.values():
            target = self.of_module(module.name)
            if target is None:
                names = sorted({name.rpartition(".")[2] for name in self._all})
                raise files.error(
                    f"it changes the module '{module.name}', but adapters of this model can change only "
                    f"{', '.join(names)}: train the adapter with these target_modules."
                )
            _check_shapes(files, module, target)
            if target in modules:
                raise files.error(f"it changes the module '{module.name}' under two names: save the adapter again.")
            modules[target] = module
        return modules


def adapters_bytes(config: EngineConfig, device: Device, model: Model) -> int:
    """Return the bytes reserved for adapters. Also checks the headers of the configured adapters, which are in folders.

    Raises StartupError.
    """
    if not config.enable_lora:
        return 0
    targets = AdapterTargets(model)
    for module in config.lora_modules:
        targets.match(read_adapter(Path(module.path)), max_rank=config.max_lora_rank)
    multiple = _PANEL if device.packs_weights else 1
    values = sum(_most_values(linear, config.max_lora_rank, multiple) for linear in targets)
    return adapters_in_memory(config) * values * model.build.dtype.itemsize


def _most_values(linear: Linear, rank: int, multiple: int) -> int:
    """Return the number of values of an adapter's term, with all sizes padded to multiples."""

    def padded(size: int) -> int:
        return -(-size // multiple) * multiple

    spec = linear.spec
    return padded(len(spec.names) * rank) * padded(spec.rank_inputs) + padded(rank) * sum(map(padded, spec.rank_outs))


def _find_targets(model: Model) -> Iterator[tuple[str, Target]]:
    """Yield the names and linear layers that adapters may change: all but experts, their routers and logits heads."""
    experts = {inner for module in model.modules() if isinstance(module, Experts) for inner in module.modules()}
    for linear in model.modules():
        if not isinstance(linear, Linear) or linear.spec.wide or linear in experts:
            continue
        names, num_parts = linear.spec.names, len(linear.spec.outs)
        for part, name in enumerate(names):
            yield name, Target(linear, part, num_parts if len(names) == 1 else part + 1)


def _check_shapes(files: AdapterFiles, module: AdapterModule, target: Target) -> None:
    needed = {module.a: (module.rank, target.linear.spec.in_features), module.b: (sum(target.outs), module.rank)}
    for tensor, shape in needed.items():
        if tensor.shape != shape:
            raise files.error(
                f"tensor '{tensor.name}' has shape {tensor.shape}, the model needs {shape}: the adapter belongs to "
                "another base model."
            )


@dataclass(frozen=True, slots=True)
class LayerTerm:
    """One adapter's term of one layer, or of this rank's shard. `down`: A of all parts of the layer. `ups`: for each
    part, its columns in the output of `down`, and B times the scale; None: the adapter does not change the part.
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
    targets, by_layer = AdapterTargets(model), dict[Linear, dict[Target, AdapterModule]]()
    own = set(targets)
    for target, module in targets.match(files, max_rank=max_rank).items():
        if target.linear in own:
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
    """Hash what determines the terms: names, scales and tensors. Paths and other settings do not count."""
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
    """Hash a part after its length, so that different lists of parts never give the same bytes."""
    digest.update(len(part).to_bytes(8, "little") if isinstance(part, bytes) else part.nbytes.to_bytes(8, "little"))
    digest.update(part)
