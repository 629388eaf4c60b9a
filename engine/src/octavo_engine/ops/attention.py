"""The interface of paged attention: a layer's spec, a step's metadata, and the backend that holds the KV cache.

A backend owns the layout of the KV cache; all other code refers to blocks by number. The metadata is the same for every
device: ragged query starts, sequence lengths, block tables and write slots. All K and V of a layer are written before
its queries read any, so that two requests of one step may share blocks.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.ops.norm import RMSWeight, rms_norm
from octavo_engine.ops.rope import Rotation, rotate_


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKVSpec:
    """The KV of one layer. `window`: how many of the latest tokens a query attends to, itself included; None: all.

    `k_scale`, `v_scale`: what the backend multiplies codes of an FP8 cache by.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer. `softcap`: logits become softcap * tanh(logits / softcap) (Gemma 2)."""

    layer_idx: int
    num_heads: int
    kv: LayerKVSpec
    scale: float
    softcap: float | None = None


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """Metadata of one step, on the device, shared by all layers.

    `num_keys`: no smaller than the sum of `seq_lens`, and known to the host.
    `slots[t]` = block * block_size + offset, where K and V of token t are written; -1: not written. `private` holds the
    backend's own data (buckets, masks), which `AttentionBackend.begin_step` sets once per step.
    """

    query_start: Int[Tensor, " seqs_plus_1"]
    seq_lens: Int[Tensor, " seqs"]  # tokens with KV after this step's writes
    block_tables: Int[Tensor, "seqs max_blocks"]
    slots: Int[Tensor, " tokens"]
    max_query_len: int
    max_seq_len: int
    num_keys: int
    private: Any = None


class AttentionBackend(Protocol):
    """The KV cache of all layers and the attention over it, for one model, device and block size."""

    def allocate(self, num_blocks: int) -> None: ...

    def release(self) -> None:
        """Free all blocks, whose contents are lost, and buffers. `allocate` must precede the next step."""
        ...

    def bytes_per_block(self) -> int: ...

    def begin_step(self, batch: AttentionBatch) -> None: ...

    def attend(
        self,
        spec: AttentionSpec,
        q: Float[Tensor, "tokens q_heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        batch: AttentionBatch,
    ) -> Float[Tensor, "tokens q_heads head_dim"]:
        """Write k and v to `batch.slots`, then attend causally over each sequence's paged KV."""
        ...

    def attend_qkv(
        self,
        spec: AttentionSpec,
        qk: Float[Tensor, "tokens q_and_kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        norm: RMSWeight | None,
        rotation: Rotation | None,
        batch: AttentionBatch,
    ) -> Float[Tensor, "tokens q_heads head_dim"]:
        """Norm and rotate queries and keys, perhaps in place, then do the same as `attend`."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks on the device, in all layers; no destination is also a source."""
        ...

    def swap_out(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        """Copy (device block, host row) pairs to `host` [num_host_blocks, bytes_per_block] uint8."""
        ...

    def swap_in(self, pairs: list[tuple[int, int]], host: Tensor) -> None: ...


class AttendByParts:
    """`attend_qkv` in separate calls, for backends without a fused kernel."""

    def attend_qkv(
        self: AttentionBackend,
        spec: AttentionSpec,
        qk: Tensor,
        v: Tensor,
        norm: RMSWeight | None,
        rotation: Rotation | None,
        batch: AttentionBatch,
    ) -> Tensor:
        if norm is not None:
            qk = rms_norm(qk, norm)
        if rotation is not None:
            rotate_(qk, rotation.cos, rotation.sin)
        q, k = qk.split_with_sizes((spec.num_heads, spec.kv.num_kv_heads), 1)
        return self.attend(spec, q, k, v, batch)


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """The arguments of a model's forward pass besides its inputs; they are passed explicitly, never as globals."""

    batch: AttentionBatch
    backend: AttentionBackend
