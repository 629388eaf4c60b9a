"""Self-attention: fused qkv projection, the backend, output projection.

The backend norms and rotates queries and keys, and owns the KV cache and the mask; this layer passes its parameters.
"""

from jaxtyping import Float
from torch import Tensor

from octavo_engine.layers.layer import Layer
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.norm import HeadNorm, ProjectionNorm
from octavo_engine.ops.attention import AttentionSpec, ForwardContext
from octavo_engine.ops.rope import Rotation


class SelfAttention(Layer):
    """The attention of one decoder layer. Norms and `rotation` are None for models without them."""

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        qkv: Linear,
        out: Linear,
        head_norm: HeadNorm | None = None,
        projection_norm: ProjectionNorm | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.qkv, self.out = spec, qkv, out
        self.head_norm, self.projection_norm = head_norm, projection_norm
        keys = spec.kv.num_kv_heads
        self.parts = (spec.num_heads + keys, keys)

    def __call__(
        self, x: Float[Tensor, "tokens hidden"], rotation: Rotation | None, ctx: ForwardContext
    ) -> Float[Tensor, "tokens hidden"]:
        heads = self.qkv(x).view(-1, sum(self.parts), self.spec.kv.head_dim)
        qk, v = heads.split_with_sizes(self.parts, 1)
        if self.projection_norm is not None:
            qk = self.projection_norm(qk)
        norm = None if self.head_norm is None else self.head_norm.prepared
        return self.out(ctx.backend.attend_qkv(self.spec, qk, v, norm, rotation, ctx.batch).flatten(1))
