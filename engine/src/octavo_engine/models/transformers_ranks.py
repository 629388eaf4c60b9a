"""The part of each rank of a model that transformers builds: roles of linear layers by their names, and head counts.

A run on the meta device records the calls of attention and feed-forward blocks. A block is divided if a trial with
numbers proves that each rank computes its part of it (`transformers_trial`). All else is whole on each rank.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo_engine.layers.attention_heads import RankHeads, check_heads, rank_heads
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.mlp import inner_share
from octavo_engine.layers.shard import split_inputs, split_outputs
from octavo_engine.models.transformers_attention import SpecRecorder, record_attention
from octavo_engine.models.transformers_latents import EXPANDING
from octavo_engine.models.transformers_trial import Call, Cut, ModelPart, Trial, Unit, UnprovenError
from octavo_engine.ops.attention import AttentionSpec
from octavo_engine.wire.errors import StartupError

#: Roles of linear layers in their block: outputs by query heads or inner values, by KV heads, by all three kinds of
#: heads, and inputs by query heads or inner values.
_ROLES = {
    "wide": "q_proj q_b_proj kv_b_proj query_key_value gate_proj up_proj gate_up_proj fc1 Wi dense_h_to_4h",
    "keys": "k_proj v_proj",
    "qkv": "qkv_proj",
    "narrow": "o_proj out_proj dense down_proj fc2 Wo dense_4h_to_h",
}
_ROLE = {name: role for role, names in _ROLES.items() for name in names.split()}
#: Numbers of heads by which the code of attention may cut tensors.
_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


def record_calls(model: PreTrainedModel) -> tuple[SpecRecorder, dict[nn.Module, Call]]:
    """Record the attention, and the calls of blocks, of a model on the meta device."""
    calls: dict[nn.Module, Call] = {}
    blocks = [module for module in model.modules() if _narrow(module) is not None]
    hooks = [
        block.register_forward_pre_hook(lambda *call: calls.setdefault(call[0], call[1:]) and None, with_kwargs=True)
        for block in blocks
    ]
    recorder = record_attention(model.base_model, torch.device("meta"))
    for hook in hooks:
        hook.remove()
    return recorder, calls


def divide(
    model: PreTrainedModel,
    name: str,
    build: BuildContext,
    recorder: SpecRecorder,
    calls: Mapping[nn.Module, Call],
    part: ModelPart,
) -> None:
    """Add this rank's part of a model to `part`. The attention of the model then has the rank's numbers of heads.

    `name`: of the model, for errors. Raises StartupError if the heads or the code of attention cannot be divided.
    """
    for spec in recorder.specs:
        check_heads(name, spec.num_heads, spec.kv.num_kv_heads, build.group.size)
    specs = dict(zip(recorder.modules, recorder.specs, strict=True))
    for module_name, module in model.named_modules():
        try:
            if module in specs:
                _divide_attention(module_name, module, calls, specs[module], build, part)
            elif module in calls:
                _divide_feed_forward(module_name, module, calls[module], build, part)
        except UnprovenError as error:
            if module in specs:
                raise StartupError(
                    f"--tensor-parallel-size {build.group.size} is not supported for {name}, which transformers runs: "
                    f"its attention '{module_name}' cannot be divided by heads: {error}: use 1."
                ) from error


def _divide_attention(
    name: str,
    module: nn.Module,
    calls: Mapping[nn.Module, Call],
    spec: AttentionSpec,
    build: BuildContext,
    part: ModelPart,
) -> None:
    narrow = _narrow(module)
    if narrow is None or module not in calls:
        raise UnprovenError(f"its linear layers are {', '.join(_linears(module))}")
    num_heads, num_keys = spec.num_heads, spec.kv.num_kv_heads
    dim = _linears(module)[narrow].in_features // num_heads
    heads = rank_heads(f"{name}.{narrow}.weight", num_heads, num_keys, dim, build)
    queries, keys = Unit(num_heads, heads.queries), Unit(num_keys, heads.keys, heads.copies)
    trial = Trial(module, calls[module])
    _set_heads(module, spec, heads)
    cuts = {key: _cut(key, linear, queries, keys, build) for key, linear in _linears(module).items() if _ROLE.get(key)}
    trial.prove(name, cuts, (queries, keys), part)
    has_latents = f"{name}.{EXPANDING}" in part.latents
    part.heads.append((len(heads.queries), 1 if has_latents else len(heads.keys)))


def _cut(key: str, linear: nn.Linear, queries: Unit, keys: Unit, build: BuildContext) -> Cut:
    """Return the cut of a linear layer of attention."""
    size = linear.out_features
    units: tuple[Unit, ...] = (queries,)
    match _ROLE[key]:
        case "narrow":
            return Cut((size,), split_inputs(build.group, queries.part(linear.in_features)))
        case "keys":
            units = (keys,)
        case "qkv":
            units = (queries, keys, keys)
    num_heads = sum(unit.count for unit in units)
    outs = tuple(size * unit.count // num_heads for unit in units)
    return Cut(outs, split_outputs(build.group, *(unit.part(out) for unit, out in zip(units, outs, strict=True))))


def _divide_feed_forward(name: str, module: nn.Module, call: Call, build: BuildContext, part: ModelPart) -> None:
    linears, narrow = _linears(module), _narrow(module)
    assert narrow is not None
    inner, wide = linears[narrow].in_features, [key for key in linears if _ROLE.get(key) == "wide"]
    if not wide or any(linears[key].out_features % inner for key in wide):
        return
    unit, group = Unit(inner, inner_share(f"{name}.{narrow}.weight", inner, build)), build.group
    cuts = {narrow: Cut((linears[narrow].out_features,), split_inputs(group, unit.own))}
    for key in wide:
        parts = linears[key].out_features // inner  # gate and up, or one of them
        cuts[key] = Cut((inner,) * parts, split_outputs(group, *(unit.own,) * parts))
    Trial(module, call).prove(name, cuts, (unit,), part)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {key: child for key, child in module.named_children() if type(child) is nn.Linear}


def _narrow(module: nn.Module) -> str | None:
    found = [key for key in _linears(module) if _ROLE.get(key) == "narrow"]
    return found[0] if len(found) == 1 else None


def _set_heads(module: nn.Module, spec: AttentionSpec, heads: RankHeads) -> None:
    """Set the numbers of heads in a module, and in a config of its own."""
    numbers = dict.fromkeys(_QUERY_HEADS, (spec.num_heads, len(heads.queries)))
    numbers |= dict.fromkeys(_KV_HEADS, (spec.kv.num_kv_heads, len(heads.keys)))
    config: Any = getattr(module, "config", None)
    if config is not None:
        module.config = config = copy(config)
    for key, (whole, own) in numbers.items():
        for each in (module, config):
            if getattr(each, key, None) == whole:
                setattr(each, key, own)
