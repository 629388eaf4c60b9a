"""The linear layers that adapters may change, whether an adapter's tensors suit them, and the memory of adapters."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo_engine.devices.device import Device
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.moe import MoE
from octavo_engine.models.model import Model
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.adapter import AdapterFiles, AdapterModule, read_adapter
from octavo_engine.wire.errors import StartupError

_PANEL = 32  # our kernel pads both sizes of a weight to multiples of it


@dataclass(frozen=True, slots=True)
class Target:
    """The layer that computes a module of the checkpoint. `first`, `end`: parts of the layer's output."""

    linear: Linear
    first: int
    end: int

    @property
    def outs(self) -> tuple[int, ...]:
        return self.linear.spec.outs[self.first : self.end]


class AdapterTargets:
    """The targets of a model, by the names of their modules."""

    def __init__(self, model: Model) -> None:
        self._prefix, self._targets = model.base_prefix, dict(_find_targets(model))

    def __iter__(self) -> Iterator[Linear]:
        return iter(dict.fromkeys(target.linear for target in self._targets.values()))

    def of_module(self, name: str) -> Target | None:
        """Return the target; a checkpoint of the bare model, without a head, omits a prefix of its names."""
        return self._targets.get(name) or self._targets.get(self._prefix + name)

    def match(self, files: AdapterFiles, *, max_rank: int) -> dict[Target, AdapterModule]:
        """Return the modules of an adapter by their targets.

        Raises StartupError for an adapter of another model, or of a rank above the limit.
        """
        modules: dict[Target, AdapterModule] = {}
        for module in files.modules.values():
            target = self.of_module(module.name)
            if target is None:
                names = sorted({name.rpartition(".")[2] for name in self._targets})
                raise files.error(
                    f"it changes the module '{module.name}', but adapters of this model can change only "
                    f"{', '.join(names)} of its layers: train it with these target_modules."
                )
            if module.rank > max_rank:
                raise files.error(
                    f"'{module.name}' has rank {module.rank}; the limit is --max-lora-rank {max_rank}: raise it to at "
                    f"least {max(each.rank for each in files.modules.values())}."
                )
            _check_shapes(files, module, target)
            if target in modules:
                raise files.error(f"it changes the module '{module.name}' under two names: save the adapter again.")
            modules[target] = module
        return modules


def adapters_bytes(config: EngineConfig, device: Device, model: Model) -> int:
    """Return the memory that is reserved for adapters, and check the headers of those that a start loads from folders.

    Raises StartupError, also where adapters are not supported.
    """
    if not config.enable_lora:
        return 0
    if not model.supports_adapters:
        raise StartupError(
            f"--enable-lora is not supported for models that transformers runs ({model.config.architecture}): leave it "
            "out, or merge the adapter into the checkpoint and serve the result."
        )
    targets = AdapterTargets(model)
    for module in config.lora_modules:
        targets.match(read_adapter(Path(module.path)), max_rank=config.max_lora_rank)
    multiple = _PANEL if device.packs_weights else 1
    values = sum(_most_values(linear, config.max_lora_rank, multiple) for linear in targets)
    return config.max_loras * values * model.build.dtype.itemsize


def _most_values(linear: Linear, rank: int, multiple: int) -> int:
    """Return the number of values of an adapter's term, with all sizes padded to multiples."""

    def padded(size: int) -> int:
        return -(-size // multiple) * multiple

    spec = linear.spec
    return padded(len(spec.names) * rank) * padded(spec.rank_inputs) + padded(rank) * sum(map(padded, spec.rank_outs))


def _find_targets(model: Model) -> Iterator[tuple[str, Target]]:
    """Yield the linear layers that get each row of a step once: all but experts, routers and heads."""
    moes = [module for module in model.modules() if isinstance(module, MoE)]
    experts = {inner for moe in moes for inner in moe.registered_experts.modules()}
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
