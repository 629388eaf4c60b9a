"""RMS norms and gated feed-forward blocks, which replace modules of transformers that a probe proves to be such.

A probe runs the module's own code on random rows: a norm's with a random weight, a block's with small linear layers in
place of its own. If the results are not those of Octavo's layer, the module stays.
"""

import inspect
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from itertools import chain, permutations, product

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.mlp import GatedMLP, gated_specs
from octavo_engine.layers.norm import RMSNorm
from octavo_engine.ops.activation import ACTIVATIONS, act_mul

#: Sizes of the rows of a probe: some show the epsilon of a norm, or the limit of an activation.
_SCALES = (1e-3, 1e-2, 0.1, 1.0, 3.0, 10.0) * 8
#: Errors of a family's code for sizes or a class that it does not expect.
_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_SMALL, _INNER = 4, 6  # hidden and inner size of a probed block


class BlockNorm(RMSNorm):
    """An RMS norm of the last dimension."""

    def __call__(self, x: Float[Tensor, "*rows n"], update: Tensor | None = None) -> Float[Tensor, "*rows n"]:
        if x.is_meta:
            return F.rms_norm(x, (self.size,))
        return super().__call__(x.reshape(-1, self.size), update).view(x.shape)


class BlockMLP(GatedMLP):
    """A gated block for rows of any shape."""

    def __call__(self, x: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        if x.is_meta:
            size = self.gate_up.spec.in_features
            return F.linear(x, x.new_empty(size, size))
        return super().__call__(x.flatten(0, -2)).view(x.shape)


@dataclass(frozen=True, slots=True)
class _Gated:
    """`names`: gate, up and down, or gate with up, and down."""

    names: tuple[str, ...]
    activation: str


def block_layer(name: str, module: nn.Module, build: BuildContext) -> BlockNorm | BlockMLP | None:
    """Return Octavo's layer for a module; None if no probe proves one."""
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    is_unary = len(inspect.signature(type(module).forward).parameters) == 2  # self and the rows
    if not is_unary or {each.dtype for each in tensors.values()} != {build.dtype}:
        return None
    if tensors.keys() == {"weight"}:
        found = _probe_norm(module, tensors["weight"])
        return found and BlockNorm(name, len(tensors["weight"]), build, eps=found[0], offset=found[1])
    linears = {key: child for key, child in module.named_children() if type(child) is nn.Linear}
    of_linears = chain.from_iterable(linear.parameters() for linear in linears.values())
    if len(linears) not in (2, 3) or len(tensors) != len(list(of_linears)):
        return None
    gated = _probe_gated(module, linears)
    if gated is None:
        return None
    down = linears[gated.names[-1]]
    sizes, has_bias = (down.out_features, down.in_features), down.bias is not None
    wide, narrow = gated_specs(name, *sizes, gated.names, build, bias=has_bias)
    return BlockMLP(Linear(wide, build), Linear(narrow, build), gated.activation)


def _probe_norm(module: nn.Module, weight: Tensor) -> tuple[float, float] | None:
    """Return the epsilon of an RMS norm, and what it adds to its weight; None if it is no RMS norm."""
    draw = torch.Generator().manual_seed(0)
    if weight.dim() != 1:
        return None
    x = torch.randn(len(_SCALES), len(weight), generator=draw) * torch.tensor(_SCALES)[:, None]
    gain = torch.randn(len(weight), generator=draw)
    half, found = (_run(module, {"weight": gain.to(dtype)}, {}, x.to(dtype)) for dtype in (weight.dtype, torch.float32))
    if found is None or half is None or half.dtype != weight.dtype or found.shape != x.shape:
        return None
    numbers = [each for each in vars(module).values() if isinstance(each, float)]
    for eps, offset in product(dict.fromkeys(numbers), (0.0, 1.0)):
        if _are_equal(found, x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (gain + offset)):
            return eps, offset
    return None


def _probe_gated(module: nn.Module, linears: Mapping[str, nn.Linear]) -> _Gated | None:
    """Return the linear layers of a gated block and its activation; None if it is no gated block."""
    draw = torch.Generator().manual_seed(0)
    for names in permutations(linears):
        *wide, down = (linears[name] for name in names)
        size, inner = down.out_features, down.in_features
        shape = {(size, inner * 2 // len(wide), down.bias is None)}
        if {(x.in_features, x.out_features, x.bias is None) for x in wide} != shape:
            continue
        small = [nn.Linear(_SMALL, 2 * _INNER // len(wide), x.bias is not None, "cpu") for x in wide]
        small.append(nn.Linear(_INNER, _SMALL, down.bias is not None, "cpu"))
        for weight in chain.from_iterable(each.parameters() for each in small):
            weight.data = torch.randn(weight.shape, generator=draw)
        x = torch.randn(1, len(_SCALES), _SMALL, generator=draw) * torch.tensor(_SCALES)[:, None]
        found = _run(module, {}, dict(zip(names, small, strict=True)), x)
        if found is None or found.shape != x.shape:
            continue
        with torch.inference_mode():
            gate_up = torch.cat([each(x[0]) for each in small[:-1]], -1)
            for activation, function in ACTIVATIONS.items():
                if _are_equal(found[0], small[-1](act_mul(gate_up, function))):
                    return _Gated(names, activation)
    return None


def _run(
    module: nn.Module, parameters: Mapping[str, Tensor], modules: Mapping[str, nn.Module], x: Tensor
) -> Tensor | None:
    """Run a module's code with other parameters and children; return None if it fails or returns no tensor."""
    probe = copy(module)
    probe._parameters = {key: nn.Parameter(each, requires_grad=False) for key, each in parameters.items()}
    probe._modules = {**module._modules, **modules}
    try:
        with torch.device("cpu"), torch.inference_mode():
            found = type(module).forward(probe, x)
    except _ERRORS:
        return None
    return found if isinstance(found, Tensor) else None


def _are_equal(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
