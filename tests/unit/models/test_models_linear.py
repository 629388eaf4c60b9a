"""The linear layer: fused, transposed, sharded, tied, packed, adapted."""

from dataclasses import replace

import pytest
import torch
from octavo_engine.layers.layer import BuildContext, WeightSlot
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.shard import Shard, split_inputs, split_outputs
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS, QuantisedTensor
from octavo_engine.ops.rank_group import Group
from octavo_engine.wire.errors import StartupError
from torch import Tensor
from torch.nn import functional as F

BUILD = BuildContext(dtype=torch.float32, device=torch.device("cpu"), max_model_len=16)
BLOCK_BUILD = replace(BUILD, dtype=torch.bfloat16)
Weights = dict[str, Tensor]


def weights_of(linear: Linear, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.shape, generator=generator) for slot in linear.weight_slots()}


def filled(linear: Linear, weights: Weights) -> Linear:
    for slot in linear.weight_slots():
        slot.load(weights[slot.name])
    return linear


def random_tensor(slot: WeightSlot) -> Tensor | QuantisedTensor:
    """Return random numbers, or blocks of random quants with small numbers as scales and minima."""
    generator = torch.Generator().manual_seed(len(slot.name))
    if slot.format is None:
        return torch.randn(slot.shape, generator=generator).bfloat16()
    out, size = slot.shape
    blocks = torch.randint(0, 64, (out, size // slot.format.num_values, slot.format.num_bytes), generator=generator)
    rows = blocks.to(torch.uint8).flatten(1)  # each byte below 64, so that no fp16 number is infinite, NaN or large
    return QuantisedTensor(slot.format, rows)


def ready(spec: LinearSpec, build: BuildContext, weights: dict[str, Tensor | QuantisedTensor]) -> Linear:
    linear = filled(Linear(spec, build), weights)
    linear.finish_loading()
    return linear


def split_spec(shard: Shard | None = None) -> LinearSpec:
    return LinearSpec(in_features=12, outs=(8, 4, 4), names=("a.q", "a.k", "a.v"), bias=True, shard=shard or Shard())


def split_result(weights: Weights, x: Tensor) -> Tensor:
    return torch.cat([F.linear(x, weights[f"a.{n}.weight"], weights[f"a.{n}.bias"]) for n in "qkv"], -1)


@pytest.mark.parametrize("packed", [False, True])
def test_separate_tensors_are_fused(packed: bool) -> None:
    linear, x = Linear(split_spec(), BUILD), torch.randn(3, 12)
    weights = weights_of(linear)
    filled(linear, weights)
    if packed:
        linear.finish_loading()
    torch.testing.assert_close(linear(x), split_result(weights, x))


def test_weight_slots_have_the_checkpoints_names() -> None:
    assert {slot.name: slot.shape for slot in Linear(split_spec(), BUILD).weight_slots()} == {
        "a.q.weight": (8, 12),
        "a.q.bias": (8,),
        "a.k.weight": (4, 12),
        "a.k.bias": (4,),
        "a.v.weight": (4, 12),
        "a.v.bias": (4,),
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_a_fused_checkpoint_tensor_is_loaded(transposed: bool) -> None:
    spec = LinearSpec(in_features=12, outs=(8, 4, 4), names=("qkv",), bias=True, transposed=transposed)
    linear, x = Linear(spec, BUILD), torch.randn(3, 12)
    weights = weights_of(linear)
    assert weights["qkv.weight"].shape == ((12, 16) if transposed else (16, 12))
    matrix = weights["qkv.weight"].t() if transposed else weights["qkv.weight"]
    torch.testing.assert_close(filled(linear, weights)(x), F.linear(x, matrix, weights["qkv.bias"]))


@pytest.mark.parametrize("names", [("a.q", "a.k", "a.v"), ("qkv",)])
def test_output_shards_are_slices_of_each_part(names: tuple[str, ...]) -> None:
    """A rank has its outputs of q, of k and of v, also if the checkpoint stores them fused."""

    def spec(shard: Shard) -> LinearSpec:
        return LinearSpec(in_features=12, outs=(8, 4, 4), names=names, bias=True, shard=shard)

    whole, x = Linear(spec(Shard()), BUILD), torch.randn(3, 12)
    weights = weights_of(whole)
    q, k, v = filled(whole, weights)(x).split_with_sizes([8, 4, 4], -1)
    for q_outs, kv_outs in ((range(2), range(1)), (range(2, 8), range(1, 4))):
        part = filled(Linear(spec(split_outputs(Group(), q_outs, kv_outs, kv_outs)), BUILD), weights)(x)
        pieces = zip((q, k, v), (q_outs, kv_outs, kv_outs), strict=True)
        torch.testing.assert_close(part, torch.cat([piece[:, outs.start : outs.stop] for piece, outs in pieces], -1))


def test_input_shards_sum_to_the_whole() -> None:
    def spec(shard: Shard) -> LinearSpec:
        return LinearSpec(in_features=12, outs=(8,), names=("o",), bias=True, shard=shard)

    whole, x = Linear(spec(Shard()), BUILD), torch.randn(3, 12)
    weights = weights_of(whole)
    groups = [Group(rank, 3) for rank in range(3)]
    shards = [split_inputs(group, group.share(12, 5), adds_up=False) for group in groups]
    assert [shard.inputs for shard in shards] == [range(5), range(5, 10), range(10, 12)]
    parts = [filled(Linear(spec(shard), BUILD), weights) for shard in shards]
    total = sum(part(piece) for part, piece in zip(parts, x.split_with_sizes([5, 5, 2], -1), strict=True))
    torch.testing.assert_close(total, filled(whole, weights)(x))


@pytest.mark.skipif(native_library() is None, reason="the kernels are not available")
@pytest.mark.parametrize("name", QUANTISED_FORMATS)
@pytest.mark.parametrize("names", [("a.gate", "a.up"), ("a.gate_up",)])
def test_shards_of_blocks_have_the_bits_of_the_whole(name: str, names: tuple[str, ...]) -> None:
    size = 2 * QUANTISED_FORMATS[name].num_values
    build = replace(BLOCK_BUILD, block_formats={f"{each}.weight": QUANTISED_FORMATS[name] for each in names})
    outs, x = (range(16, 48), range(16, 48)), torch.randn(3, size).bfloat16()
    whole, part = (
        LinearSpec(in_features=size, outs=(64, 64), names=names, gated=True, bias=True, shard=shard)
        for shard in (Shard(), split_outputs(Group(), *outs))
    )
    weights = {slot.name: random_tensor(slot) for slot in Linear(whole, build).weight_slots()}
    expected = ready(whole, build, weights)(x).unflatten(-1, (2, 64))[..., 16:48].flatten(-2)
    assert torch.equal(ready(part, build, weights)(x), expected)
    half = replace(whole, shard=split_inputs(Group(1, 2), range(size // 2, size), adds_up=False))
    zeroed = x.clone()
    zeroed[:, : size // 2] = 0
    bias = weights[f"{names[0]}.bias"] if len(names) == 1 else torch.cat([weights[f"{n}.bias"] for n in names])
    without_bias = ready(half, build, weights)(x[:, size // 2 :].contiguous())
    torch.testing.assert_close(without_bias + bias, ready(whole, build, weights)(zeroed), atol=0.05, rtol=0.02)


@pytest.mark.skipif(native_library() is None, reason="the kernels are not available")
def test_inputs_in_another_order_are_not_split() -> None:
    build = replace(BLOCK_BUILD, block_formats={"o.weight": QUANTISED_FORMATS["Q8_0"]})
    spec = LinearSpec(in_features=64, outs=(8,), names=("o",), shard=split_inputs(Group(0, 2), range(32)))
    (slot,) = Linear(spec, build).weight_slots()
    tensor = replace(random_tensor(slot), order=torch.arange(64).flip(0))
    with pytest.raises(StartupError, match="act-order"):
        slot.load(tensor)


def test_packing_drops_the_plain_weight_and_keeps_the_count() -> None:
    linear = filled(Linear(split_spec(), BUILD), weights_of(Linear(split_spec(), BUILD)))
    before = linear.weights_bytes()
    linear.finish_loading()
    assert linear.method.weight is None
    assert linear.weights_bytes() == before == 4 * (16 * 12 + 16)


def test_a_tied_weight_is_not_loaded() -> None:
    matrix = torch.randn(5, 12)
    linear = Linear(LinearSpec(in_features=12, outs=(5,), names=("lm_head",)), BUILD, tied=matrix)
    assert list(linear.weight_slots()) == []
    linear.finish_loading()
    x = torch.randn(2, 12)
    torch.testing.assert_close(linear(x), F.linear(x, matrix))


def test_an_adapter_receives_the_input_and_each_part() -> None:
    linear, x = Linear(split_spec(), BUILD), torch.randn(3, 12)
    weights = weights_of(linear)
    plain = filled(linear, weights)(x)

    def adapt(inputs: Tensor, parts: tuple[Tensor, ...]) -> None:
        assert inputs is x
        assert [part.shape[-1] for part in parts] == [8, 4, 4]
        parts[1].add_(1.0)

    linear.adapter = adapt
    torch.testing.assert_close(linear(x) - plain, torch.tensor([0.0] * 8 + [1.0] * 4 + [0.0] * 4).expand(3, 16))
