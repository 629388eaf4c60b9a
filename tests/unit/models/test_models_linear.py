"""The linear layer: fused, transposed, sharded, tied, packed, adapted."""

import pytest
import torch
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.layers.shard import Shard
from octavo_engine.wire.errors import StartupError
from torch import Tensor
from torch.nn import functional as F

BUILD = BuildContext(dtype=torch.float32, device=torch.device("cpu"), max_model_len=16)
Weights = dict[str, Tensor]


def weights_of(linear: Linear, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.shape, generator=generator) for slot in linear.weight_slots()}


def filled(linear: Linear, weights: Weights) -> Linear:
    for slot in linear.weight_slots():
        slot.load(weights[slot.name])
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
    """A rank has its part of q, of k and of v, also if the checkpoint stores them fused."""

    def spec(shard: Shard) -> LinearSpec:
        return LinearSpec(in_features=12, outs=(8, 4, 4), names=names, bias=True, shard=shard)

    whole, x = Linear(spec(Shard()), BUILD), torch.randn(3, 12)
    weights = weights_of(whole)
    q, k, v = filled(whole, weights)(x).split_with_sizes([8, 4, 4], -1)
    for rank in range(2):
        part = filled(Linear(spec(Shard(dim="out", rank=rank, size=2)), BUILD), weights)(x)
        expected = torch.cat([piece.chunk(2, -1)[rank] for piece in (q, k, v)], -1)
        torch.testing.assert_close(part, expected)


def test_input_shards_sum_to_the_whole() -> None:
    def spec(shard: Shard) -> LinearSpec:
        return LinearSpec(in_features=12, outs=(8,), names=("o",), bias=True, shard=shard)

    whole, x = Linear(spec(Shard()), BUILD), torch.randn(3, 12)
    weights = weights_of(whole)
    parts = [filled(Linear(spec(Shard(dim="in", rank=rank, size=3)), BUILD), weights) for rank in range(3)]
    total = sum(part(piece) for part, piece in zip(parts, x.chunk(3, -1), strict=True))
    torch.testing.assert_close(total, filled(whole, weights)(x))


def test_an_indivisible_shard_is_refused() -> None:
    with pytest.raises(StartupError, match="8 output features cannot be split over 3 ranks"):
        Linear(split_spec(Shard(dim="out", rank=0, size=3)), BUILD)


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
