"""Octavo's layers that replace modules of transformers: linear layers, the embedding, the logits head and experts.

They are called like the modules that they replace. On torch's meta device, on which each start runs the code of the
family once, they check the shapes of their inputs and return empty rows, because nothing is loaded yet. A module is
replaced only if its class is known to compute what Octavo's layer computes; other modules stay, with their weights.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from octavo_engine.layers.embedding import Embedding
from octavo_engine.layers.head import gather_logits
from octavo_engine.layers.layer import BuildContext, Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import DenseMethod, LinearSpec
from octavo_engine.layers.mlp import gated_specs
from octavo_engine.layers.moe import Experts
from octavo_engine.layers.norm import RankNorm
from octavo_engine.layers.shard import split_outputs, vocabulary_shares
from octavo_engine.models.transformers_blocks import BlockMLP, block_layer
from octavo_engine.models.transformers_latents import LatentHeads
from octavo_engine.models.transformers_trial import Cut, HeadSizes, ModelPart
from octavo_engine.models.transformers_weights import CheckpointNames
from octavo_engine.ops.activation import ACTIVATIONS, act_mul

#: Shapes for testing a class of experts: 5 rows, the two weights of 3 experts, and 2 routing weights per row.
_PROBE_SHAPES = ((5, 6), (3, 8, 6), (3, 6, 4), (5, 2))


#: RoPE types whose frequencies transformers computes from the longest sequence of a step.
_VARIABLE_ROPES = ("dynamic", "longrope")


class WeightIsReadError(Exception):
    """The code of a family reads the weight of a linear layer, which Octavo stores in another form."""

    def __init__(self, layer: "RowLinear") -> None:
        super().__init__(layer.spec.names[0])
        self.layer = layer


class RowLinear(Linear):
    """A linear layer for inputs [..., in_features]. A `wide` one is the head, with fp32 outputs of all ranks."""

    def __init__(
        self, name: str, module: nn.Linear, build: BuildContext, cut: Cut, *, wide: bool = False, tied: Any = None
    ) -> None:
        names, has_bias = (name,), module.bias is not None
        size, shard = module.in_features, cut.shard
        spec = LinearSpec(in_features=size, outs=cut.outs, names=names, bias=has_bias, wide=wide, shard=shard)
        super().__init__(spec, build, tied=tied)
        self.replaced = (module,)  # in a tuple, as the module is no part of the model
        self.is_tied = tied is not None
        self._dtype = build.dtype

    def __call__(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        if x.is_meta:
            spec = self.spec
            outs = sum(spec.outs if spec.wide else spec.rank_outs)
            out = F.linear(x, x.new_empty(outs, spec.rank_inputs, dtype=self._dtype))
            return out.float() if spec.wide else out
        rows = x.flatten(0, -2)
        out = gather_logits(self.wide(rows), self) if self.spec.wide else super().__call__(rows)
        return out.view(*x.shape[:-1], out.shape[-1])

    @property
    def weight(self) -> Tensor:
        raise WeightIsReadError(self)


class RowEmbedding(Embedding):
    """A table of tokens for ids of any shape."""

    def __init__(self, name: str, module: nn.Embedding, build: BuildContext) -> None:
        rows, size = module.weight.shape
        super().__init__(name, rows, size, build)
        self.replaced = (module,)
        self._dtype = build.dtype

    def __call__(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch size"]:
        shape = (*ids.shape, self.shape[1])
        if ids.is_meta:
            return torch.empty(shape, dtype=self._dtype, device=ids.device)
        return super().__call__(ids.flatten()).view(shape)


class RowNorm(RankNorm):
    """An RMS norm over the values of all ranks."""

    def __call__(self, x: Float[Tensor, "*rows part"], update: Tensor | None = None) -> Float[Tensor, "*rows part"]:
        return x if x.is_meta else super().__call__(x, update)


class RowExperts(Experts):
    """Experts that are called with rows, and the numbers and weights of each row's experts. The run on the meta device
    shows how many each row has. Each rank has a part of every expert."""

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor, start: Tensor | None = None) -> Tensor:
        if x.is_meta:
            self.top_k = numbers.shape[1]
            return x.new_empty(len(numbers), self.specs[0].in_features)
        return self.specs[1].shard.group.all_reduce(super().__call__(x, numbers, weights.float(), start))


class FixedRope:
    """Keeps the frequencies of a transformers RoPE module; they would follow the longest sequence of each step.

    transformers takes them for the `default` type, which never changes, except in `fix`.
    """

    def __init__(self, rope: Any) -> None:
        self._rope, self._type = rope, rope.rope_type  # of all layers, or by layer type
        self._hold()

    @classmethod
    def of_model(cls, model: nn.Module) -> list["FixedRope"]:
        types = {module: getattr(module, "rope_type", None) for module in model.modules()}
        listed = {module: each.values() if isinstance(each, dict) else [each] for module, each in types.items()}
        return [cls(module) for module, found in listed.items() if any(each in _VARIABLE_ROPES for each in found)]

    def release(self) -> None:
        """Restore the module's own type, which the code that computes its tensors needs."""
        self._rope.rope_type = self._type

    def fix(self, max_model_len: int) -> None:
        """Set the frequencies to those of a step with the longest sequence."""
        device = next(self._rope.buffers()).device
        x, last = (torch.full((1, 1), each, device=device) for each in (0.0, max_model_len - 1))
        for layer_type in self._type if isinstance(self._type, dict) else [None]:
            self._rope(x, last) if layer_type is None else self._rope(x, last, layer_type)
        self._hold()

    def _hold(self) -> None:
        is_listed = isinstance(self._type, dict)
        self._rope.rope_type = dict.fromkeys(self._type, "default") if is_listed else "default"


def replace_layers(
    model: PreTrainedModel, names: CheckpointNames, build: BuildContext, part: ModelPart, *, has_blocks: bool
) -> None:
    """Put our layers in place of all modules that have one, with this rank's part of them. Modules with another type
    than the model's stay. `has_blocks`: also in place of norms and gated feed-forward blocks."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    table = tied = getattr(embedding, "weight", None)
    modules, num_experts = [(name, module) for name, module in model.named_modules() if name], dict[str, int]()
    for name, module in modules:
        layer: Layer | None = None
        if module is embedding and type(module) is nn.Embedding and module.weight.dtype == build.dtype:
            layer = RowEmbedding(name, module, build)
            tied = layer.weight
        elif (layer := _experts(name, module, names, build)) is not None:
            num_experts[name.rpartition(".")[0]] = len(layer.each)
        elif has_blocks and name not in part.norms:
            layer = block_layer(name, module, build)
        if layer is not None:
            model.set_submodule(name, layer)
    for name, module in [*model.named_modules()]:
        if type(module) is nn.Linear and module.weight.dtype == build.dtype:
            of_layer = replace(build, quantise_to=None) if _routes(name, module, num_experts) else build
            cut = _cut_head(module, build) if module is head else part.linears.get(name, Cut.whole(module))
            if name in part.latents:
                _replace_expansion(model, name, cut, part.latents[name], build)
                continue
            tie = tied if module.weight is table else None
            if tie is not None and tie is table:  # transformers' own embedding, which is whole on each rank
                tie = _rank_rows(table, cut)
            model.set_submodule(name, RowLinear(name, module, of_layer, cut, wide=module is head, tied=tie))
        elif (norm := part.norms.get(name)) is not None:
            size, copies = module.weight.numel(), norm.copies
            model.set_submodule(name, RowNorm(name, size, build, eps=norm.eps, part=norm.values, copies=copies))
    for name, rows in part.rows.items():
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        held = getattr(module, key)[rows.own.start : rows.own.stop]
        module._parameters[key] = nn.Parameter(held, requires_grad=False)


def _replace_expansion(model: nn.Module, name: str, cut: Cut, sizes: HeadSizes, build: BuildContext) -> None:
    """Remove a linear layer that expands latents, and let attention compute over these."""
    attention, _, key = name.rpartition(".")
    owner = model.get_submodule(attention)
    linear: Any = owner._modules.pop(key)
    spec = LinearSpec(in_features=linear.in_features, outs=cut.outs, names=(name,), shard=cut.shard)
    LatentHeads(spec, build, sizes).replace_in(owner)


def linears_of(module: nn.Module) -> list[Linear]:
    """Return the layers that take the place of a module's linear layers, without those of experts."""
    if isinstance(module, BlockMLP):
        return [module.gate_up, module.down]
    return [module] if isinstance(module, RowLinear) else []


def restore(model: PreTrainedModel, layer: RowLinear) -> None:
    """Put the original module back in place of a linear layer, and also the embedding if they share a weight."""
    (module,) = layer.replaced
    embedding: Any = model.get_input_embeddings()
    if isinstance(embedding, RowEmbedding) and embedding.replaced[0].weight is module.weight:
        model.set_submodule(embedding.name, embedding.replaced[0])
    model.set_submodule(layer.spec.names[0], module)


def tie_head(model: PreTrainedModel, build: BuildContext) -> None:
    """Let a tied head use the weight of transformers' own embedding, once that weight has memory."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if isinstance(head, RowLinear) and head.is_tied and not isinstance(embedding, RowEmbedding):
        cut = Cut(head.spec.outs, head.spec.shard)
        head.method = DenseMethod(head.spec, build, _rank_rows(embedding.weight.detach(), cut))


def _rank_rows(table: Tensor, cut: Cut) -> Tensor:
    rows = cut.shard.outputs(0, len(table))
    return table[rows.start : rows.stop]


def _cut_head(module: nn.Linear, build: BuildContext) -> Cut:
    rows = vocabulary_shares(build.group, module.out_features)[build.group.rank]
    return Cut((module.out_features,), split_outputs(build.group, rows))


def _routes(name: str, module: nn.Linear, num_experts: Mapping[str, int]) -> bool:
    """Return whether a layer routes to experts, or gates a shared expert. `num_experts`: by module with experts."""
    return any(name.startswith(f"{block}.") and len(module.weight) in (1, num) for block, num in num_experts.items())


def _experts(name: str, module: nn.Module, names: CheckpointNames, build: BuildContext) -> RowExperts | None:
    """Return Octavo's experts for a module of transformers; None if its class is not known to compute the same."""
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    if tensors.keys() != {"gate_up_proj", "down_proj"} or {each.dtype for each in tensors.values()} != {build.dtype}:
        return None
    projections, activation = names.of_experts(name), _probe_experts(module)
    if projections is None or activation is None:
        return None
    num_experts, size, inner = tensors["down_proj"].shape
    specs = [gated_specs(f"{name}.{idx}", size, inner, projections, build, adds_up=False) for idx in range(num_experts)]
    return RowExperts(name, specs, 1, activation, build)


def _probe_experts(module: nn.Module) -> str | None:
    """Return the activation with which Octavo's experts compute what the module computes; None if there is none.

    The module's own code runs on few random experts.
    """
    code: Any = getattr(type(module).forward, "__wrapped__", None)  # of `use_experts_implementation`
    draw = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.inference_mode():
        x, wide, narrow, weights = (3 * torch.randn(shape, generator=draw) for shape in _PROBE_SHAPES)
        numbers = torch.arange(10).view(5, 2) % len(wide)
        probe = copy(module)
        probe._parameters = {"gate_up_proj": nn.Parameter(wide), "down_proj": nn.Parameter(narrow)}
        probe.num_experts = len(wide)  # type: ignore[assignment]
        try:
            found = code(probe, x, numbers, weights)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the class is of another kind
            return None
        for name, activation in ACTIVATIONS.items():
            each = [act_mul(x @ up.t(), activation) @ down.t() for up, down in zip(wide, narrow, strict=True)]
            chosen = torch.stack(each, 1).gather(1, numbers[..., None].expand(-1, -1, x.shape[1]))
            if torch.allclose(found, (chosen * weights[..., None]).sum(1), rtol=1e-4, atol=1e-4):
                return name
    return None
