"""Self-attention: fused qkv projection, norm and rotation of queries and keys, the backend, output projection.

The backend owns the KV cache and the mask; this layer only passes its `AttentionSpec`.
"""

from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.norm import HeadNorm, ProjectionNorm
from octavo_engine.layers.rope import Rotation
from octavo_engine.ops.attention import AttentionSpec, ForwardContext
from octavo_engine.ops.rope import rotate_


class SelfAttention(Layer):
    """The attention of one decoder layer. `head_norm` and `rotation` are None for models without them."""

    def __init__(
        self, spec: AttentionSpec, *, qkv: Linear, out: Linear, head_norm: HeadNorm | ProjectionNorm | None = None
    ) -> None:
        super().__init__()
        self.spec, self.qkv, self.out, self.head_norm = spec, qkv, out, head_norm
        queries, keys = spec.num_heads, spec.kv.num_kv_heads
        self.num_heads = queries + 2 * keys
        self.parts = (queries + keys, keys)
        self.query_key = (queries, keys)

    def __call__(
        self, x: Float[Tensor, "tokens hidden"], rotation: Rotation | None, ctx: ForwardContext
    ) -> Float[Tensor, "tokens hidden"]:
        heads = self.qkv(x).view(-1, self.num_heads, self.spec.kv.head_dim)
        qk, v = heads.split_with_sizes(self.parts, 1)
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        if rotation is not None:
            rotate_(qk, rotation.cos, rotation.sin)
        q, k = qk.split_with_sizes(self.query_key, 1)
        return self.out(ctx.backend.attend(self.spec, q, k, v, ctx.batch).flatten(1))
