"""The linear layer: a spec of its checkpoint tensors, a method that computes, and a hook for adapters."""

from collections.abc import Callable, Iterable

from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import BuildContext, Layer, WeightSlot
from octavo_engine.layers.linear_method import LinearMethod, LinearSpec
from octavo_engine.layers.quantised_method import linear_method
from octavo_engine.ops.activation import Activation, act_mul
from octavo_engine.ops.native_quantised import QuantisedWeight

#: Adds a term, in place, to a linear layer's output, or to a rank's partial output before the all-reduce. Arguments:
#: the input, and the parts of the output (`LinearSpec.rank_outs`).
Adapter = Callable[[Tensor, tuple[Tensor, ...]], None]


class Linear(Layer):
    def __init__(
        self,
        spec: LinearSpec,
        build: BuildContext,
        *,
        tied: Tensor | QuantisedWeight | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.method: LinearMethod = method or linear_method(spec, build, tied)
        self.adapter: Adapter | None = None

    def __call__(self, x: Float[Tensor, "rows in_features"]) -> Float[Tensor, "rows out_features"]:
        out, shard = self._adapted(x, self.method.apply(x)), self.spec.shard
        return shard.group.all_reduce(out) if shard.adds_up else out

    def wide(self, x: Float[Tensor, "rows in_features"]) -> Float[Tensor, "rows out_features"]:
        """Apply the layer with fp32 outputs."""
        return self._adapted(x, self.method.apply_wide(x))

    def gated(self, x: Float[Tensor, "rows in_features"], activation: Activation) -> Float[Tensor, "rows n"]:
        """Apply the layer and then the gated activation; the halves of the layer's output are gate and up."""
        return act_mul(self(x), activation) if self.adapter is not None else self.method.apply_gated(x, activation)

    def weight_slots(self) -> Iterable[WeightSlot]:
        return self.method.weight_slots()

    def finish_loading(self) -> None:
        self.method.pack()

    def weights_bytes(self) -> int:
        return self.method.weights_bytes()

    def bytes_added_by_packing(self) -> int:
        return self.method.bytes_added_by_packing()

    def _adapted(self, x: Tensor, out: Tensor) -> Tensor:
        if self.adapter is not None:
            self.adapter(x, out.split_with_sizes(self.spec.rank_outs, -1))
        return out
