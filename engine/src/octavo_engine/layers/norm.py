"""Normalisation layers. RMS weights are kept in fp32: they are small, and Gemma's 1 + w loses bits in bf16."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.attention_heads import RankHeads
from octavo_engine.layers.layer import BuildContext, Layer, WeightSlot
from octavo_engine.ops.norm import RMSWeight, add_rms_norm, layer_norm, rms_norm, rms_weight


class RMSNorm(Layer):
    """RMS norm. `offset` is added to the weight: 1 if the checkpoint stores weights around zero (Gemma).

    `part`: this rank's range of the checkpoint's `size` values; None: all.
    """

    prepared: RMSWeight

    def __init__(
        self,
        name: str,
        size: int,
        build: BuildContext,
        *,
        eps: float,
        offset: float = 0.0,
        part: range | None = None,
    ) -> None:
        super().__init__()
        self.name, self.size, self.eps, self.offset = name, size, eps, offset
        self.part = slice(size) if part is None else slice(part.start, part.stop)
        self.weight = build.empty(size, dtype=torch.float32)[self.part]

    def __call__(self, x: Float[Tensor, "rows hidden"], update: Tensor | None = None) -> Float[Tensor, "rows hidden"]:
        """Normalise `x`. `update` is first added to `x`, the residual stream, in place."""
        return rms_norm(x, self.prepared) if update is None else add_rms_norm(update, x, self.prepared)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{self.name}.weight", (self.size,), lambda tensor: self.weight.copy_(tensor[self.part]))

    def finish_loading(self) -> None:
        self.prepared = rms_weight(self.weight + self.offset, self.eps)

    def weights_bytes(self) -> int:
        return 2 * self.weight.numel() * self.weight.dtype.itemsize


class HeadNorm(Layer):
    """RMS norm of each head's query and key (Qwen 3, Gemma 3), which the attention backend computes.

    It is one weight with a row per head.
    """

    prepared: RMSWeight

    def __init__(self, prefix: str, heads: RankHeads, build: BuildContext, *, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.prefix, self.eps, self.offset = prefix, eps, offset
        num_queries, num_keys = len(heads.queries), len(heads.keys)
        self.weight = build.empty(num_queries + num_keys, heads.dim, dtype=torch.float32)
        self.query, self.key = self.weight.split_with_sizes((num_queries, num_keys))

    def weight_slots(self) -> Iterator[WeightSlot]:
        shape = (self.weight.shape[-1],)
        yield WeightSlot(f"{self.prefix}.q_norm.weight", shape, self.query.copy_)
        yield WeightSlot(f"{self.prefix}.k_norm.weight", shape, self.key.copy_)

    def finish_loading(self) -> None:
        self.prepared = rms_weight(self.weight + self.offset, self.eps)

    def weights_bytes(self) -> int:
        return 2 * self.weight.numel() * self.weight.dtype.itemsize


class RankNorm(RMSNorm):
    """RMS norm over the values of all ranks, of which each has a part.

    Squares are added up over the ranks; a value that several ranks have counts once for each of its `copies`, in the
    sum as in the number of values.
    """

    def __init__(self, name: str, size: int, build: BuildContext, *, eps: float, part: range, copies: int = 1) -> None:
        super().__init__(name, size, build, eps=eps, part=part)
        self.group, self.count = build.group, size * copies

    def __call__(self, x: Float[Tensor, "*rows part"], update: Tensor | None = None) -> Float[Tensor, "*rows part"]:
        assert update is None
        return super().__call__(x) if self.group.size == 1 else self.scaled(x, self.group.all_reduce(self.squares(x)))

    def squares(self, x: Float[Tensor, "*rows part"]) -> Float[Tensor, "*rows 1"]:
        return x.float().square().sum(-1, keepdim=True)

    def scaled(self, x: Float[Tensor, "*rows part"], squares: Float[Tensor, "*rows 1"]) -> Float[Tensor, "*rows part"]:
        """Normalise `x`. `squares`: of all ranks."""
        return (x.float() * self.weight * (squares / self.count + self.eps).rsqrt()).to(x.dtype)


class ProjectionNorm(Layer):
    """RMS norm of the whole query and of the whole key, over all heads together (OLMoE).

    `num_heads`: query and key heads of the checkpoint; `heads`: those of the rank.
    """

    def __init__(
        self, prefix: str, num_heads: tuple[int, int], heads: RankHeads, build: BuildContext, *, eps: float
    ) -> None:
        super().__init__()
        self.group, self.heads = build.group, (len(heads.queries), len(heads.keys))
        query_size, key_size = (each * heads.dim for each in num_heads)
        self.query = RankNorm(f"{prefix}.q_norm", query_size, build, eps=eps, part=heads.query_values)
        self.key = RankNorm(f"{prefix}.k_norm", key_size, build, eps=eps, part=heads.key_values, copies=heads.copies)

    def __call__(self, x: Float[Tensor, "tokens heads head_dim"]) -> Float[Tensor, "tokens heads head_dim"]:
        query, key = (part.flatten(1) for part in x.split_with_sizes(self.heads, 1))
        if self.group.size == 1:
            return torch.cat([self.query(query), self.key(key)], 1).view(x.shape)
        squares = self.group.all_reduce(torch.cat([self.query.squares(query), self.key.squares(key)], 1))
        return torch.cat([self.query.scaled(query, squares[:, :1]), self.key.scaled(key, squares[:, 1:])], 1).view(
            x.shape
        )


class LayerNorm(Layer):
    """Layer norm. `affine` False: without weight and bias."""

    def __init__(self, name: str, size: int, build: BuildContext, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = build.empty(size) if affine else None
        self.bias = build.empty(size) if affine else None

    def __call__(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def weight_slots(self) -> Iterator[WeightSlot]:
        for part, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None:
                yield WeightSlot(f"{self.name}.{part}", tuple(tensor.shape), tensor.copy_)

    def weights_bytes(self) -> int:
        return sum(t.numel() * t.dtype.itemsize for t in (self.weight, self.bias) if t is not None)
