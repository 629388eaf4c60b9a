"""Attention of transformers' models over the paged KV cache, registered in its `AttentionInterface` as `NAME`.

transformers passes the keyword `octavo` of a model's forward pass on to `_attend`. Its value is the `PagedAttention` of
a step or, at the start, a `SpecRecorder` of heads, windows and scales, which `config.json` may state wrongly.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from octavo_engine.ops.attention import AttentionSpec, ForwardContext, LayerKVSpec

NAME = "octavo"
#: Keywords that change no result of attention: there is no dropout, the batch has the positions, and others ask for
#: further outputs.
_UNUSED = {
    *("dropout", "position_ids", "use_cache", "cache_position", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}


class UnsupportedAttention(ValueError):
    """A property of a model's attention that the paged KV cache does not have; the message continues "it ..."."""


class Attention(Protocol):
    """The value of the keyword `octavo`."""

    def attend(self, module: nn.Module, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with rows [tokens, heads, head_dim], K and V of one size; `spec` describes this call of `module`."""
        ...


class Latents(Protocol):
    """The attribute `latent_heads` of a module whose K and V are latents, of one head."""

    def queries(self, q: Tensor) -> Tensor:
        """Return queries [1, heads, tokens, size of a latent's K] for latents."""
        ...

    def values(self, out: Tensor) -> Tensor:
        """Return the outputs [tokens, heads, size of a value] from those over latents [tokens, heads, size of K]."""
        ...


@dataclass(slots=True)
class SpecRecorder:
    """Records the specs and modules of the layers in order; its attention returns the queries."""

    specs: list[AttentionSpec] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def attend(self, module: nn.Module, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if spec.layer_idx != len(self.specs):
            raise UnsupportedAttention(f"attends in layer {spec.layer_idx} after {len(self.specs)} calls")
        self.specs.append(spec)
        self.modules.append(module)
        return q


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The attention of one step. A call must equal the recorded `specs`, or a kernel would write outside its blocks."""

    specs: list[AttentionSpec]
    context: ForwardContext

    def attend(self, module: nn.Module, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        expected = self.specs[spec.layer_idx]
        if spec != expected:
            raise UnsupportedAttention(f"attends with {spec}, but the KV cache was made for {expected}")
        return self.context.backend.attend(spec, q, k, v, self.context.batch)


def record_attention(base: nn.Module, device: torch.device) -> SpecRecorder:
    """Record the attention of each layer in one step of a base model. Raises any error of its code."""
    recorder, ids = SpecRecorder(), torch.arange(3, device=device)[None]
    with torch.inference_mode():
        base(input_ids=ids, position_ids=ids, use_cache=False, octavo=recorder)
    return recorder


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    octavo: Attention | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend with heads [1, heads, tokens, head_dim]; return rows [1, tokens, heads, size of a value]."""
    if octavo is None:
        raise UnsupportedAttention("does not pass keywords on to its attention")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedAttention("has attention that is not causal")
    latents: Latents | None = getattr(module, "latent_heads", None)
    query = query if latents is None else latents.queries(query)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    size = v.shape[-1]
    if size != k.shape[-1]:  # DeepSeek: the cache has one size for both
        v = F.pad(v, (0, k.shape[-1] - size))
    out = octavo.attend(module, _spec_of_call(module, q, k, keywords), q, k, v)
    return (out[..., :size] if latents is None else latents.values(out))[None], None


def _spec_of_call(module: nn.Module, q: Tensor, k: Tensor, keywords: dict[str, Any]) -> AttentionSpec:
    given = {name: value for name, value in keywords.items() if value is not None and name not in _UNUSED}
    scale, window, softcap = (given.pop(name, None) for name in ("scaling", "sliding_window", "softcap"))
    if given:
        raise UnsupportedAttention(f"has attention with {', '.join(sorted(given))}, which is not built")
    head_dim = q.shape[-1]
    return AttentionSpec(
        layer_idx=int(module.layer_idx),  # type: ignore[arg-type]
        num_heads=q.shape[1],
        kv=LayerKVSpec(num_kv_heads=k.shape[1], head_dim=head_dim, window=window),
        scale=head_dim**-0.5 if scale is None else float(scale),
        softcap=softcap,
    )


AttentionInterface.register(NAME, _attend)
