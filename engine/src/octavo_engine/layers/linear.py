"""The one linear layer: a spec of what the checkpoint holds, a method that computes, a hook for adapters."""

from collections.abc import Callable, Iterable

from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import Build, Layer, Slot
from octavo_engine.layers.linear_method import DenseMethod, LinearMethod, LinearSpec

#: Called with the layer's input and its output, fused parts in the order of `LinearSpec.outs`, to add in place.
Adapter = Callable[[Tensor, tuple[Tensor, ...]], None]


class Linear(Layer):
    def __init__(
        self, spec: LinearSpec, build: Build, *, tied: Tensor | None = None, method: LinearMethod | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.method: LinearMethod = method or DenseMethod(spec, build, tied)
        self.adapter: Adapter | None = None

    def __call__(self, x: Float[Tensor, "rows in_features"]) -> Float[Tensor, "rows out_features"]:
        out = self.method.apply(x)
        if self.adapter is not None:
            self.adapter(x, out.split_with_sizes([self.spec.shard.local(part, "out") for part in self.spec.outs], -1))
        return out

    def slots(self) -> Iterable[Slot]:
        return self.method.slots()

    def finish_loading(self) -> None:
        self.method.pack()

    def weights_bytes(self) -> int:
        return self.method.weights_bytes()
