"""Norms and feed-forward blocks that a probe recognises, and similar ones that stay as they are."""

from collections.abc import Callable

import pytest
import torch
from octavo_engine.layers.layer import BuildContext
from octavo_engine.models.transformers_blocks import BlockMLP, BlockNorm, block_layer
from octavo_engine.ops.activation import ACTIVATIONS
from torch import Tensor, nn
from torch.nn import functional as F

BUILD = BuildContext(dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=8)
HIDDEN, INNER = 32, 48


class Norm(nn.Module):
    def __init__(self, code: Callable[..., Tensor], eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(HIDDEN)), eps
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.code(wide, self.weight, wide.square().mean(-1, keepdim=True), self.epsilon).to(x.dtype)


class GatedNorm(Norm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class WideNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def rms(x: Tensor, weight: Tensor, square: Tensor, eps: float) -> Tensor:
    return x * (square + eps).rsqrt() * weight


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[float, float] | None]] = {
    "rms": (lambda: Norm(rms), (1e-5, 0.0)),
    "other-epsilon": (lambda: Norm(rms, 1e-8), (1e-8, 0.0)),
    "offset": (lambda: Norm(lambda x, weight, *rest: rms(x, weight + 1, *rest)), (1e-5, 1.0)),
    "epsilon-outside": (lambda: Norm(lambda x, weight, square, eps: x / (square.sqrt() + eps) * weight), None),
    "own-epsilon": (lambda: Norm(lambda x, weight, square, _: rms(x, weight, square, 1e-3)), None),
    "centred": (lambda: nn.LayerNorm(HIDDEN, bias=False), None),
    "bias": (lambda: nn.LayerNorm(HIDDEN), None),
    "gate": (lambda: GatedNorm(rms), None),
    "fp32-results": (lambda: WideNorm(rms), None),
    "no-norm": (lambda: nn.Embedding(HIDDEN, 4), None),
}


@pytest.mark.parametrize("name", NORMS)
def test_rms_norms_are_recognised(name: str) -> None:
    make, expected = NORMS[name]
    with torch.device("meta"):
        module = make().to(torch.bfloat16)
    layer = block_layer("n", module, BUILD)
    assert isinstance(layer, BlockNorm) == (expected is not None)
    if isinstance(layer, BlockNorm):
        assert (layer.eps, layer.offset) == expected
        assert [(slot.name, slot.shape) for slot in layer.weight_slots()] == [("n.weight", (HIDDEN,))]


class MLP(nn.Module):
    """`names`: gate, up, down; or gate with up, and down."""

    def __init__(self, code: Callable[..., Tensor], *names: str, bias: bool = False) -> None:
        super().__init__()
        self.code, self.names = code, names
        sizes = [(HIDDEN, 2 * INNER // (len(names) - 1))] * (len(names) - 1) + [(INNER, HIDDEN)]
        for name, size in zip(names, sizes, strict=True):
            setattr(self, name, nn.Linear(*size, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        *wide, down = (getattr(self, name) for name in self.names)
        gate, up = torch.cat([each(x) for each in wide], -1).chunk(2, -1)
        return down(self.code(gate, up))


class Shared(MLP):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class WithParameter(MLP):
    def __init__(self) -> None:
        super().__init__(silu, *LLAMA)
        self.scale = nn.Parameter(torch.ones(1))


def silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=7.0)) * up


LLAMA, FUSED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
MLPS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[str, ...], str] | None]] = {
    "silu": (lambda: MLP(silu, *LLAMA), (LLAMA, "silu")),
    "other-names": (lambda: MLP(silu, "w3", "w1", "w2", bias=True), (("w3", "w1", "w2"), "silu")),
    "tanh": (lambda: MLP(lambda g, up: F.gelu(g, approximate="tanh") * up, *LLAMA), (LLAMA, "gelu_new")),
    "erf": (lambda: MLP(lambda gate, up: F.gelu(gate) * up, *LLAMA), (LLAMA, "gelu")),
    "fused": (lambda: MLP(silu, *FUSED), (FUSED, "silu")),
    "fused-up-first": (lambda: MLP(lambda up, gate: silu(gate, up), *FUSED), None),
    "clamped": (lambda: MLP(clamped, *LLAMA), None),
    "scaled": (lambda: MLP(lambda gate, up: silu(gate, up) * 0.9, *LLAMA), None),
    "other-function": (lambda: MLP(lambda gate, up: F.mish(gate) * up, *LLAMA), None),
    "second-argument": (lambda: Shared(silu, *LLAMA), None),
    "parameter": (WithParameter, None),
}


@pytest.mark.parametrize("name", MLPS)
def test_gated_blocks_are_recognised(name: str) -> None:
    make, expected = MLPS[name]
    with torch.device("meta"):
        module = make().to(torch.bfloat16)
    layer = block_layer("m", module, BUILD)
    assert isinstance(layer, BlockMLP) == (expected is not None)
    if isinstance(layer, BlockMLP) and expected is not None:
        names, activation = expected
        assert layer.activation is ACTIVATIONS[activation]
        assert [*layer.gate_up.spec.names, *layer.down.spec.names] == [f"m.{each}" for each in names]
        assert layer.gate_up.spec.bias == layer.down.spec.bias == (name == "other-names")
        x = torch.empty(1, 3, HIDDEN, dtype=torch.bfloat16, device="meta")
        assert layer(x).shape == x.shape
        with pytest.raises(RuntimeError):
            layer(x[..., 1:])


def test_modules_of_another_type_stay() -> None:
    with torch.device("meta"):
        norm, mlp = Norm(rms), MLP(silu, *LLAMA)
    assert block_layer("n", norm, BUILD) is block_layer("m", mlp, BUILD) is None
