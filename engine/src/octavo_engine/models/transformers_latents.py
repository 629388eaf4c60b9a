"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over the latents themselves.

The code of a family expands the latent of each token to K and V of all heads: `expand_kv` calls the linear layer
`kv_b_proj`. `LatentHeads` takes the place of both. It multiplies the key rows of that layer's weight into the queries,
and the value rows into the outputs of attention, so that the KV cache has one head of latents for all query heads.
"""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from octavo_engine.layers.layer import BuildContext, Layer, WeightSlot
from octavo_engine.layers.linear_method import DenseMethod, LinearSpec
from octavo_engine.models.transformers_trial import Call, HeadSizes, ModelPart, Trial, UnprovenError

#: The linear layer that expands latents, and the attributes with the sizes of a head's key, without RoPE, and value.
EXPANDING = "kv_b_proj"
_SIZES = ("qk_nope_head_dim", "v_head_dim")
#: Keys [heads, size, latent] and values [heads, latent, size].
Halves = tuple[Tensor, Tensor]


class LatentHeads(Layer):
    """The key and value rows of each head of this rank, dense in the model's dtype."""

    def __init__(self, spec: LinearSpec, build: BuildContext, sizes: HeadSizes, weight: Tensor | None = None) -> None:
        """`spec`: of the linear layer. `sizes`: of a head's key and value. `weight`: one that is not loaded."""
        super().__init__()
        self._sizes, self._method = sizes, DenseMethod(spec, build, weight)
        self._halves: Halves | None = None

    def replace_in(self, attention: nn.Module) -> None:
        """Let a module of transformers compute its attention over latents."""
        attention.expand_kv, attention.latent_heads = self.expand, self  # type: ignore[assignment]

    def expand(
        self, latents: Float[Tensor, "1 1 tokens latent"], rope: Float[Tensor, "1 1 tokens rope"]
    ) -> tuple[Float[Tensor, "1 1 tokens latent_and_rope"], Float[Tensor, "1 1 tokens latent_and_rope"]]:
        """Return K and V of the only head; `values` ignores the part of the outputs that V's RoPE part gives."""
        keys = torch.cat((latents, rope), -1)
        return keys, keys

    def queries(
        self, q: Float[Tensor, "1 heads tokens key_and_rope"]
    ) -> Float[Tensor, "1 heads tokens latent_and_rope"]:
        """Return queries for latents: for a latent c and the key rows W of a head, q . (W c) = (q W) . c"""
        keys, _ = self._halves_on(q.device)
        return torch.cat((q[..., : keys.shape[1]] @ keys, q[..., keys.shape[1] :]), -1)

    def values(self, out: Float[Tensor, "tokens heads latent_and_rope"]) -> Float[Tensor, "tokens heads value"]:
        """Return the outputs of attention from sums of latents."""
        _, values = self._halves_on(out.device)
        return (out[..., : values.shape[1]].transpose(0, 1) @ values).transpose(0, 1)

    def weight_slots(self) -> Iterable[WeightSlot]:
        return self._method.weight_slots()

    def finish_loading(self) -> None:
        """Copy the halves, because torch would copy parts of a weight before each product in bf16."""
        keys, values = self._split_weight()
        self._halves, self._method.weight = (keys.contiguous(), values.contiguous()), None

    def weights_bytes(self) -> int:
        return self._method.weights_bytes()

    def _halves_on(self, device: torch.device) -> Halves:
        """Return the keys and values on a device, which is meta while the model is traced."""
        if self._halves is None:
            keys, values = self._split_weight()
            return keys.to(device), values.to(device)
        return self._halves

    def _split_weight(self) -> Halves:
        assert self._method.weight is not None, "split already"
        rows = self._method.weight.view(-1, sum(self._sizes), self._method.weight.shape[1])
        keys, values = rows.split_with_sizes([*self._sizes], 1)
        return keys, values.mT


def find_latents(model: nn.Module, calls: Mapping[nn.Module, Call], build: BuildContext, part: ModelPart) -> str:
    """Add to `part` the linear layers that expand latents, if trials prove that attention needs only the latents.

    `calls`: of modules, on the meta device. Returns what a log line says of the KV cache.
    """
    found: dict[str, HeadSizes] = {}
    for name, module in model.named_modules():
        if expands_latents(module):
            try:
                found[f"{name}.{EXPANDING}"] = _prove(module, calls.get(module), build)
            except UnprovenError as error:
                return (
                    f"; the KV cache has the keys and values of all heads: latents failed the trial of {name}: {error}"
                )
    part.latents.update(found)
    return "; the KV cache has the latents" if found else ""


def expands_latents(module: nn.Module) -> bool:
    return hasattr(module, "expand_kv")


def _prove(module: nn.Module, call: Call | None, build: BuildContext) -> HeadSizes:
    """Return the sizes of a head. Raises UnprovenError."""
    linear, (key, value) = getattr(module, EXPANDING, None), (getattr(module, each, 0) for each in _SIZES)
    has_bias = getattr(linear, "bias", None) is not None
    if call is None or type(linear) is not nn.Linear or has_bias or not (key and value):
        raise UnprovenError("its layers are others than those of DeepSeek-V3")
    if linear.out_features % (key + value):
        raise UnprovenError(f"its {linear.out_features} keys and values are not those of heads")
    trial = Trial(module, call, absorbed=EXPANDING)
    spec = LinearSpec(in_features=linear.in_features, outs=(linear.out_features,), names=(EXPANDING,))
    LatentHeads(spec, build, (key, value), trial.absorbed_weight()).replace_in(module)
    try:
        trial.prove_absorbed()
    finally:
        del module.expand_kv, module.latent_heads
    return key, value
