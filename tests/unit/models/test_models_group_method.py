"""Linear layers whose weights are in groups: fused, split over ranks, reordered, quantised while they load."""

from dataclasses import replace

import pytest
import torch
from octavo_engine.layers.attention_heads import rank_heads
from octavo_engine.layers.embedding import Embedding
from octavo_engine.layers.group_method import GroupMethod
from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import DenseMethod, LinearSpec
from octavo_engine.layers.mlp import gated_specs
from octavo_engine.layers.shard import Shard, split_inputs, split_outputs
from octavo_engine.ops.activation import ACTIVATIONS
from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor, expand_groups
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS
from octavo_engine.ops.rank_group import Group
from octavo_engine.wire.errors import StartupError
from octavo_testing.group_weights import KINDS, random_groups
from torch import Tensor
from torch.nn import functional as F

BUILD = BuildContext(dtype=torch.float16, device=torch.device("cpu"), max_model_len=16)
SIZE = 128
INT8 = GroupFormat(name="int8", codes="int8", group_size=128)
INT4 = GroupFormat(name="int4", codes="int4", group_size=128, offsets="zeros")
Weights = dict[str, Tensor | GroupTensor]


def build_of(kind: GroupFormat, *names: str) -> BuildContext:
    return replace(BUILD, block_formats={f"{name}.weight": kind for name in names})


def random_weights(slots: list[WeightSlot]) -> Weights:
    draw = torch.Generator().manual_seed(1)
    found: Weights = {}
    for seed, slot in enumerate(slots):
        if slot.format is None:
            found[slot.name] = torch.randn(slot.shape, generator=draw).half()
        else:
            assert isinstance(slot.format, GroupFormat)
            found[slot.name] = random_groups(slot.format, *slot.shape, seed=seed)
    return found


def loaded(spec: LinearSpec, build: BuildContext, weights: Weights) -> Linear:
    linear = Linear(spec, build)
    assert isinstance(linear.method, GroupMethod)
    for slot in linear.weight_slots():
        slot.load(weights[slot.name])
    linear.finish_loading()
    return linear


def expanded(weights: Weights, names: tuple[str, ...]) -> Tensor:
    return torch.cat([expand_groups(weights[f"{name}.weight"], torch.float16) for name in names])


def held(linear: Linear) -> Tensor:
    assert isinstance(linear.method, GroupMethod)
    return expand_groups(linear.method.weight, torch.float16)


@pytest.mark.parametrize("names", [("a.q", "a.k", "a.v"), ("qkv",)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_parts_are_fused_and_split(kind: GroupFormat, names: tuple[str, ...]) -> None:
    """A rank has any outputs of each part, or whole groups of inputs."""
    build = build_of(kind, *names)

    def spec(shard: Shard) -> LinearSpec:
        return LinearSpec(in_features=SIZE, outs=(24, 8, 8), names=names, bias=True, shard=shard)

    weights = random_weights(list(Linear(spec(Shard()), build).weight_slots()))
    whole, x = loaded(spec(Shard()), build, weights), torch.randn(3, SIZE).half()
    matrix = expanded(weights, names)
    assert torch.equal(held(whole), matrix)
    bias = torch.cat([weights[f"{name}.bias"] for name in names])
    assert torch.equal(whole(x), F.linear(x, matrix, bias))
    assert torch.equal(whole.wide(x), F.linear(x.float(), matrix.float(), bias.float()))
    assert torch.equal(whole.gated(x, ACTIVATIONS["silu"]), F.silu(whole(x)[:, :20]) * whole(x)[:, 20:])
    outs = (range(7, 20), range(3, 5), range(8))
    part = loaded(spec(split_outputs(Group(), *outs)), build, weights)
    rows = torch.cat([matrix[:24][7:20], matrix[24:32][3:5], matrix[32:]])
    assert torch.equal(held(part), rows)
    assert part.weights_bytes() == part.method.weight.nbytes + 2 * len(rows)
    half = loaded(spec(split_inputs(Group(1, 2), range(64, 128), adds_up=False)), build, weights)
    assert torch.equal(held(half), matrix[:, 64:])
    assert half.method.bias is None


@pytest.mark.parametrize("codes", ["int4", "int8", "e4m3"])
def test_a_group_of_all_inputs_is_cut_at_32_inputs(codes: str) -> None:
    kind = replace(KINDS[codes], group_size=SIZE)
    spec = LinearSpec(in_features=SIZE, outs=(8,), names=("o",), shard=split_inputs(Group(1, 2), range(96, 128)))
    build = build_of(kind, "o")
    weights = random_weights(list(Linear(spec, build).weight_slots()))
    part = loaded(spec, build, weights)
    assert part.method.weight.format.group_size == 32
    assert torch.equal(held(part), expanded(weights, ("o",))[:, 96:])


def test_inputs_are_gathered_once_in_their_order() -> None:
    names, kind = ("gate", "up"), KINDS["int4 with zeros"]
    spec = LinearSpec(in_features=SIZE, outs=(8, 8), names=names, gated=True)
    build = build_of(kind, *names)
    weights = random_weights(list(Linear(spec, build).weight_slots()))
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(2))
    ordered = {name: replace(tensor, order=order) for name, tensor in weights.items()}
    linear, x = loaded(spec, build, ordered), torch.randn(3, SIZE).half()
    assert torch.equal(linear(x), F.linear(x[:, order], expanded(weights, names)))
    with pytest.raises(StartupError, match=r"tensor 'up\.weight': its inputs have another order"):
        loaded(spec, build, ordered | {"up.weight": weights["up.weight"]})
    split = replace(spec, shard=split_inputs(Group(0, 2), range(64)))
    with pytest.raises(StartupError, match=r"act-order.* cannot be split over --tensor-parallel-size 2"):
        loaded(split, build, ordered)


def test_parts_with_tables_that_differ_are_refused() -> None:
    names, kind = ("gate", "up"), KINDS["table4"]
    spec, build = LinearSpec(in_features=SIZE, outs=(8, 8), names=names), build_of(kind, *names)
    weights = random_weights(list(Linear(spec, build).weight_slots()))
    assert loaded(spec, build, weights)
    other = replace(weights["up.weight"], table=torch.linspace(-1, 2, 16))
    with pytest.raises(StartupError, match=r"tensor 'up\.weight': its table of values .* differs from those of"):
        loaded(spec, build, weights | {"up.weight": other})


def test_parts_of_several_formats_are_expanded() -> None:
    formats = {"q.weight": KINDS["int4"], "k.weight": KINDS["int8"]}
    spec = LinearSpec(in_features=SIZE, outs=(8, 8), names=("q", "k"))
    linear = Linear(spec, replace(BUILD, block_formats=formats))
    assert isinstance(linear.method, DenseMethod)
    assert [slot.format for slot in linear.weight_slots()] == [None, None]


def test_an_embedding_is_expanded_with_its_tied_head() -> None:
    table = Embedding("embed", 40, 64, build_of(KINDS["int8"], "embed"))
    (slot,) = table.weight_slots()
    assert slot.format is None
    spec = LinearSpec(in_features=64, outs=(40,), names=("head",), wide=True)
    assert isinstance(Linear(spec, build_of(KINDS["int8"], "head"), tied=table.weight).method, DenseMethod)


def test_ranks_that_cut_groups_are_refused_with_sizes_that_work() -> None:
    kind = replace(KINDS["int8"], group_size=64)
    build = replace(build_of(kind, "o"), group=Group(0, 4))
    with pytest.raises(
        StartupError, match=r"tensor 'o\.weight': .* in int8 blocks of 64, which .* cut: use one of 1, 2,"
    ):
        rank_heads("o.weight", 8, 8, 16, build)  # of 32 inputs each
    with pytest.raises(StartupError, match=r"'m\.down\.weight': its 128 inputs are 2 int8 blocks of 64, too few"):
        gated_specs("m", 64, 128, ("g", "u", "down"), replace(build, block_formats={"m.down.weight": kind}))
    for quantised in (INT8, QUANTISED_FORMATS["Q8_0"]):  # by a flag, which may be omitted
        loading = replace(BUILD, quantise_to=quantised, group=Group(0, 16))
        with pytest.raises(StartupError, match=r"cut: use one of 1.*, or omit --quantization\.$"):
            rank_heads("o.weight", 16, 16, 24, loading)
        with pytest.raises(StartupError, match=r"use at most \d+, or omit --quantization\.$"):
            gated_specs("m", 64, 256, ("g", "u", "down"), loading)
    one_group = replace(build_of(replace(kind, group_size=128), "o"), group=Group(1, 4))
    assert rank_heads("o.weight", 8, 8, 16, one_group).query_values == range(32, 64)


def test_groups_of_weights_that_are_quantised_fit_the_parts_of_ranks() -> None:
    """Ranks have 448 inputs of the heads of Qwen2.5-0.5B, which are 3.5 groups of 128; whole inputs keep these."""
    builds = [replace(BUILD, quantise_to=INT4, group=Group(rank, 2)) for rank in range(2)]
    heads = [rank_heads("o.weight", 14, 2, 64, build) for build in builds]
    assert [each.query_values for each in heads] == [range(448), range(448, 896)]
    weight = torch.randn(16, 896)

    def held_of(build: BuildContext, shard: Shard) -> tuple[int, Tensor]:
        linear = loaded(LinearSpec(in_features=896, outs=(16,), names=("o",), shard=shard), build, {"o.weight": weight})
        return linear.method.weight.format.group_size, held(linear)

    found = [held_of(build, each.split_out(build.group)) for build, each in zip(builds, heads, strict=True)]
    assert [size for size, _ in found] == [32, 32]
    small = replace(BUILD, quantise_to=replace(INT4, group_size=32))
    assert torch.equal(torch.cat([values for _, values in found], 1), held_of(small, Shard())[1])
    assert held_of(builds[1], split_outputs(Group(1, 2), range(8, 16)))[0] == 128
    wide = replace(BUILD, quantise_to=INT4, group=Group(3, 4))
    _, down = gated_specs("m", 64, 256, ("g", "u", "down"), wide)
    assert down.shard.inputs == range(192, 256)  # of two groups of 128


@pytest.mark.parametrize("size", [256, 96])
@pytest.mark.parametrize("kind", [INT8, INT4], ids=lambda kind: kind.name)
def test_weights_are_quantised_while_they_load(kind: GroupFormat, size: int) -> None:
    """Errors are at most half a step, also where groups of 128 do not divide the inputs."""
    spec = LinearSpec(in_features=size, outs=(16, 8), names=("gate", "up"))
    build = replace(BUILD, quantise_to=kind)
    slots = list(Linear(spec, build).weight_slots())
    assert [(slot.format, slot.quantises) for slot in slots] == [(None, True)] * 2
    weights = {slot.name: torch.randn(slot.shape).bfloat16() for slot in slots}
    weights["gate.weight"][3] = 0
    weights["gate.weight"][4] = weights["gate.weight"][4].abs()
    linear = loaded(spec, build, weights)
    held_format = linear.method.weight.format
    assert held_format.group_size == (128 if size == 256 else 32)
    values = expand_groups(linear.method.weight, torch.float32)
    steps = linear.method.weight.scales.t().float().repeat_interleave(held_format.group_size, 1)
    error = (values - torch.cat(list(weights.values())).float()).abs()
    assert (error <= steps * (0.51 if kind is INT8 else 1.01)).all()
    assert not values[3].any()


def test_a_transposed_weight_is_quantised_as_its_transpose() -> None:
    spec = LinearSpec(in_features=64, outs=(8,), names=("fc",), transposed=True)
    build = replace(BUILD, quantise_to=INT8)
    weight = torch.randn(64, 8)
    plain = loaded(replace(spec, transposed=False), build, {"fc.weight": weight.t()})
    assert torch.equal(held(loaded(spec, build, {"fc.weight": weight})), held(plain))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e38])
@pytest.mark.parametrize("kind", [INT8, INT4], ids=lambda kind: kind.name)
def test_a_weight_that_is_not_finite_names_tensor_and_output(kind: GroupFormat, value: float) -> None:
    spec, build = LinearSpec(in_features=256, outs=(16,), names=("up",)), replace(BUILD, quantise_to=kind)
    weight = torch.randn(16, 256)
    weight[11, 200] = value
    with pytest.raises(StartupError, match=f"tensor 'up.weight': output 11 has a weight .* too large for {kind.name}"):
        loaded(spec, build, {"up.weight": weight})
