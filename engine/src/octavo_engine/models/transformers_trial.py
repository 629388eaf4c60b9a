"""Proves that the layers of a rank compute its part of a block of transformers, by a call with random numbers.

The block runs once whole and once as the rank has it. Linear layers multiply by matrices of rank one, so that layers of
any size cost little. If each of them gets the rank's part of its inputs in the whole block, the sum of the ranks'
outputs is the output of the whole block.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from octavo_engine.layers.shard import Shard
from octavo_engine.models.transformers_attention import SpecRecorder
from octavo_engine.ops.attention import AttentionSpec
from octavo_engine.wire.errors import first_line

Call = tuple[tuple[Any, ...], dict[str, Any]]
#: Sizes of a head's key, without RoPE, and value, which a linear layer makes from a latent.
HeadSizes = tuple[int, int]


class UnprovenError(Exception):
    """A rank does not compute its part of a block; the message names the difference."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A linear layer's parts, as in `LinearSpec`, and this rank's shard of them."""

    outs: tuple[int, ...]
    shard: Shard

    @classmethod
    def whole(cls, module: nn.Linear) -> "Cut":
        return cls((module.out_features,), Shard())


@dataclass(frozen=True, slots=True)
class NormCut:
    """This rank's values of an RMS norm over the values of all ranks. `copies`: ranks that have each value."""

    values: range
    copies: int
    eps: float


@dataclass(frozen=True, slots=True)
class Unit:
    """A rank's range of `count` heads, inner values or rows. `copies`: ranks that have each of them."""

    count: int
    own: range
    copies: int = 1

    def part(self, size: int) -> range:
        """Return the rank's range of `size` values, of which each head has as many. Raises UnprovenError."""
        each, rest = divmod(size, self.count)
        if rest:
            raise UnprovenError(f"{size} values are not divisible by {self.count}")
        return range(self.own.start * each, self.own.stop * each)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A rank's part of a model, by the names of linear layers, norms and parameters; all else is whole.

    `heads`: the numbers of query and KV heads of each layer's attention. `latents`: linear layers that attention over
    latents makes needless.
    """

    linears: dict[str, Cut] = field(default_factory=dict)
    norms: dict[str, NormCut] = field(default_factory=dict)
    rows: dict[str, Unit] = field(default_factory=dict)
    heads: list[tuple[int, int]] = field(default_factory=list)
    latents: dict[str, HeadSizes] = field(default_factory=dict)


class _SmallAttention:
    """Causal attention over the tokens of one call."""

    def attend(self, _: nn.Module, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1)


class Trial:
    """A call of a whole block, with whose layers `prove` compares those of a rank.

    `absorbed`: a linear layer that another form of the block lacks; its bias is zero.
    """

    def __init__(self, block: nn.Module, call: Call, *, absorbed: str = "") -> None:
        """Run the block. `call`: arguments on the meta device."""
        self._block, self._draw, self._absorbed = block, torch.Generator().manual_seed(0), absorbed
        self._args, self._keywords = tree_map(self._random, call)
        tensors = dict(chain(block.named_parameters(), block.named_buffers()))
        linears = {key for key, module in block.named_modules() if type(module) is nn.Linear}
        self._own = {key: self._random(x) for key, x in tensors.items() if key.rpartition(".")[0] not in linears}
        self._calls: list[tuple[str, Tensor, Tensor]] = []
        self._weights: dict[str, tuple[Tensor, Tensor]] = {}  # row and column
        self._output = self._run(self._own, self._record)

    def prove(self, name: str, cuts: Mapping[str, Cut], units: tuple[Unit, ...], part: ModelPart) -> None:
        """Run the block, of this name, with cut linear layers. Add these to `part`, with norms and parameters that
        `units` divide. Raises UnprovenError."""
        rows = {
            key: unit
            for key, tensor in self._block.named_parameters()
            for unit in units
            if key in self._own and tensor.dim() > 1 and len(tensor) == unit.count
        }
        own = self._own | {key: _take(self._own[key], 0, unit.own) for key, unit in rows.items()}
        norms: dict[str, NormCut] = {}
        self._check_output(self._run(own, partial(self._compare, iter(self._calls), cuts, units, norms)))
        part.linears.update({f"{name}.{key}": cut for key, cut in cuts.items()})
        part.norms.update({f"{name}.{key}": norm for key, norm in norms.items()})
        part.rows.update({f"{name}.{key}": unit for key, unit in rows.items()})

    def absorbed_weight(self) -> Tensor:
        """Return the weight [out, in] of the absorbed layer. Raises UnprovenError if the block did not call it."""
        if self._absorbed not in self._weights:
            raise UnprovenError(f"it does not call '{self._absorbed}'")
        row, column = self._weights[self._absorbed]
        return column[:, None] * row

    def prove_absorbed(self) -> None:
        """Run the block, which now lacks the absorbed layer. Raises UnprovenError if it computes something else."""
        calls = (call for call in self._calls if call[0] != self._absorbed)
        self._check_output(self._run(self._own, partial(self._compare, calls, {}, (), {})))

    def _check_output(self, output: list[Tensor]) -> None:
        for found, whole in zip(output, self._output, strict=True):
            _check(found, whole, "its output")

    def _random(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return _SmallAttention() if isinstance(x, SpecRecorder) else x
        if x.is_floating_point() or x.is_complex():
            return torch.randn(x.shape, dtype=_wide(x.dtype), generator=self._draw)
        return torch.arange(x.numel()).view(x.shape).to(x.dtype)

    def _run(self, own: Mapping[str, Tensor], call: Callable[..., Tensor]) -> list[Tensor]:
        """Run the block with its own tensors; `call` runs modules in it that have tensors."""
        modules = {key: each for key, each in self._block.named_modules() if key and _has_tensors(each)}
        for key, module in modules.items():
            module.forward = partial(call, key, module, module.forward)
        try:
            with torch.device("cpu"), torch.inference_mode():
                output = functional_call(self._block, dict(own), self._args, self._keywords)
        except UnprovenError:
            raise
        except Exception as error:  # the code of a family
            raise UnprovenError(first_line(error)) from error
        finally:
            for module in modules.values():
                del module.forward
        return [each for each in tree_leaves(output) if isinstance(each, Tensor)]

    def _record(self, key: str, module: nn.Module, forward: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        if type(module) is nn.Linear:
            row, column, bias = (
                torch.randn(size, generator=self._draw) for size in (x.shape[-1], *[len(module.weight)] * 2)
            )
            column *= torch.linspace(0.5, 2, len(column)) / math.sqrt(len(row))  # the outputs of ranks differ in size
            self._weights[key] = (row, column)
            out = (x * row).sum(-1, keepdim=True) * column + bias * (key != self._absorbed)
        else:
            out = forward(x, *args)
        self._calls.append((key, x, out))
        return out

    def _compare(
        self,
        calls: Iterator[tuple[str, Tensor, Tensor]],
        cuts: Mapping[str, Cut],
        units: tuple[Unit, ...],
        norms: dict[str, NormCut],
        key: str,
        module: nn.Module,
        forward: Callable[..., Tensor],
        x: Tensor,
        *args: Any,
    ) -> Tensor:
        """Return the rank's part of the outputs of the whole block's module, if `x` is its part of the inputs."""
        whole_key, inputs, outputs = next(calls, ("", x, x))
        if key != whole_key:
            raise UnprovenError(f"it calls '{key}' instead of '{whole_key}'")
        if type(module) is nn.Linear:
            cut = cuts.get(key, Cut.whole(module))
            shard = cut.shard
            _check(x, inputs if shard.inputs is None else _take(inputs, -1, shard.inputs), f"the input of '{key}'")
            parts = enumerate(outputs.split_with_sizes(cut.outs, -1))
            return torch.cat([_take(each, -1, shard.outputs(i, each.shape[-1])) for i, each in parts], -1)
        weight, eps = self._own.get(f"{key}.weight"), getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
        if x.shape[-1] == inputs.shape[-1] or weight is None or weight.shape != inputs.shape[-1:]:
            return forward(x, *args)
        _check(
            inputs * (inputs.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, outputs, f"'{key}' as RMS norm"
        )
        for unit in units:
            values = unit.part(inputs.shape[-1])
            if _are_equal(x, _take(inputs, -1, values)):
                norms[key] = NormCut(values, unit.copies, eps)
                return _take(outputs, -1, values)
        raise UnprovenError(f"the input of '{key}' is no part of that of the whole model")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype.is_complex else torch.float32


def _has_tensors(module: nn.Module) -> bool:
    return any(x is not None for x in chain(module._parameters.values(), module._buffers.values()))


def _take(x: Tensor, dim: int, values: range) -> Tensor:
    return x.narrow(dim, values.start, len(values))


def _are_equal(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def _check(found: Tensor, expected: Tensor, what: str) -> None:
    if not _are_equal(found, expected):
        raise UnprovenError(f"{what} is another one than in the whole model")
