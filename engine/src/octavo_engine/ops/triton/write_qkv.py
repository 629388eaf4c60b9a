"""Norm and rotation of queries and keys, and the write of K and V into the paged cache, in one launch."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from octavo_engine.ops.norm import RMSWeight
from octavo_engine.ops.rope import Rotation
from octavo_engine.ops.triton.sizes import cdiv, next_power_of_2
from octavo_engine.ops.triton.write_kv import to_stored

_TILE_VALUES = 1024  # values of the heads of one program


def write_qkv(
    cache: Shaped[Tensor, "blocks two kv_heads block_size head_dim"],
    qk: Float[Tensor, "tokens q_and_kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    slots: Int[Tensor, " tokens"],
    norm: RMSWeight | None,
    rotation: Rotation | None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Float[Tensor, "tokens q_heads head_dim"]:
    """Return the queries; write K and V of token t to cache slot `slots[t]`, unless that is -1. Inputs may be strided.

    A cache of bytes gets e4m3 codes. `scales`: the factors of K's and V's codes.
    """
    kv_heads, block_size, dim = cache.shape[2:]
    tokens, heads, _ = qk.shape
    for x in (qk, v):
        assert x.stride(1) == dim
        assert x.stride(2) == 1
    rotary_dim = 0 if rotation is None else rotation.cos.shape[2]
    if rotation is not None:
        assert rotation.cos.stride() == rotation.sin.stride()
    q = torch.empty((tokens, heads - kv_heads, dim), dtype=qk.dtype, device=qk.device)
    dim_row = next_power_of_2(dim)
    tile_heads = max(1, _TILE_VALUES // dim_row)
    write_qkv_kernel[(tokens, cdiv(heads + kv_heads, tile_heads))](
        *(q, cache, qk, v, slots),
        qk if norm is None else norm.gain,
        *((qk, qk) if rotation is None else (rotation.cos, rotation.sin)),
        *(qk.stride(0), v.stride(0), 0 if rotation is None else rotation.cos.stride(0)),
        *(0.0 if norm is None else norm.native.floor_squared, 1.0 / scales[0], 1.0 / scales[1]),
        Q_HEADS=heads - kv_heads,
        KV_HEADS=kv_heads,
        TILE_HEADS=tile_heads,
        DIM=dim,
        DIM_ROW=dim_row,
        ROTARY=rotary_dim,
        HAS_NORM=norm is not None,
        BLOCK=block_size,
    )
    return q


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
@no_type_check
def write_qkv_kernel(
    q_ptr,  # [tokens, Q_HEADS, DIM], contiguous
    cache_ptr,  # [blocks, 2, KV_HEADS, BLOCK, DIM], contiguous
    qk_ptr,  # [tokens, Q_HEADS + KV_HEADS, DIM]; rows of stride qk_stride
    v_ptr,  # [tokens, KV_HEADS, DIM]; rows of stride v_stride
    slots_ptr,  # [tokens] int32 or int64; -1: not written
    gain_ptr,  # [Q_HEADS + KV_HEADS, DIM] fp32, if HAS_NORM
    cos_ptr,  # [tokens, ROTARY]; rows of stride angle_stride
    sin_ptr,  # the same, with the sign of the rotation
    qk_stride,
    v_stride,
    angle_stride,
    floor_squared,
    k_factor,  # multiplies values before they become codes
    v_factor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROW: tl.constexpr,
    ROTARY: tl.constexpr,  # 0: none
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.cast(tl.program_id(0), tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)  # first those of qk, then those of v
    dim = tl.arange(0, DIM_ROW)
    is_dim = dim < DIM
    is_qk = (head < Q_HEADS + KV_HEADS)[:, None] & is_dim[None, :]
    at = head[:, None] * DIM + dim[None, :]
    raw = tl.load(qk_ptr + token * qk_stride + at, mask=is_qk, other=0.0)
    x = raw.to(tl.float32)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) + floor_squared)
        x = x * factor[:, None] * tl.load(gain_ptr + at, mask=is_qk, other=0.0)
    if ROTARY > 0:
        is_turned = dim < ROTARY
        crossed = tl.where(is_turned, (dim + ROTARY // 2) % ROTARY, dim)
        crossed_at = head[:, None] * DIM + crossed[None, :]
        y = tl.load(qk_ptr + token * qk_stride + crossed_at, mask=is_qk, other=0.0).to(tl.float32)
        if HAS_NORM:
            y = y * factor[:, None] * tl.load(gain_ptr + crossed_at, mask=is_qk, other=0.0)
        cos = tl.load(cos_ptr + token * angle_stride + dim, mask=is_turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * angle_stride + dim, mask=is_turned, other=0.0).to(tl.float32)
        x = x * cos[None, :] + y * sin[None, :]
    is_q = (head < Q_HEADS)[:, None] & is_dim[None, :]
    tl.store(q_ptr + token * (Q_HEADS * DIM) + at, x.to(raw.dtype), mask=is_q)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        page_ptr = cache_ptr + slot // BLOCK * (2 * KV_HEADS * BLOCK * DIM) + slot % BLOCK * DIM
        k_head = head - Q_HEADS
        is_k = (k_head >= 0)[:, None] & is_qk
        k = to_stored(x.to(raw.dtype), k_factor, cache_ptr.dtype.element_ty)
        tl.store(page_ptr + k_head[:, None] * (BLOCK * DIM) + dim[None, :], k, mask=is_k)
        v_head = k_head - KV_HEADS
        is_v = ((v_head >= 0) & (v_head < KV_HEADS))[:, None] & is_dim[None, :]
        v = tl.load(v_ptr + token * v_stride + v_head[:, None] * DIM + dim[None, :], mask=is_v, other=0.0)
        v = to_stored(v, v_factor, cache_ptr.dtype.element_ty)
        v_page_ptr = page_ptr + KV_HEADS * BLOCK * DIM
        tl.store(v_page_ptr + v_head[:, None] * (BLOCK * DIM) + dim[None, :], v, mask=is_v)
