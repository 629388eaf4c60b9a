"""Writing the K and V of a step into the paged cache, one program for each token."""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from octavo_engine.ops.triton.sizes import next_power_of_2


def write_kv(
    cache: Shaped[Tensor, "blocks two kv_heads block_size head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
    slots: Int[Tensor, " tokens"],
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write row t of `k` and `v` to cache slot `slots[t]`, unless that is -1. `k` and `v` may be strided.

    A cache of bytes gets e4m3 codes. `scales`: the factors of K's and V's codes.
    """
    kv_heads, block_size, dim = cache.shape[2:]
    for x in (k, v):
        assert x.stride(1) == dim
        assert x.stride(2) == 1
    write_kv_kernel[(len(k),)](
        cache,
        k,
        v,
        slots,
        k.stride(0),
        v.stride(0),
        1.0 / scales[0],
        1.0 / scales[1],
        KV_HEADS=kv_heads,
        BLOCK=block_size,
        DIM=dim,
        ROW=next_power_of_2(kv_heads * dim),
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
@no_type_check
def write_kv_kernel(
    cache_ptr,  # [blocks, 2, KV_HEADS, BLOCK, DIM], contiguous
    k_ptr,  # [tokens, KV_HEADS, DIM]; rows of stride k_stride
    v_ptr,  # the same; rows of stride v_stride
    slots_ptr,  # [tokens] int32 or int64; -1: not written
    k_stride,
    v_stride,
    k_factor,  # multiplies values before they become codes
    v_factor,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
):
    token = tl.cast(tl.program_id(0), tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        at = tl.arange(0, ROW)
        mask = at < KV_HEADS * DIM
        offset = slot // BLOCK * (2 * KV_HEADS * BLOCK * DIM) + (at // DIM * BLOCK + slot % BLOCK) * DIM + at % DIM
        k = to_stored(tl.load(k_ptr + token * k_stride + at, mask=mask), k_factor, cache_ptr.dtype.element_ty)
        tl.store(cache_ptr + offset, k, mask=mask)
        v = to_stored(tl.load(v_ptr + token * v_stride + at, mask=mask), v_factor, cache_ptr.dtype.element_ty)
        tl.store(cache_ptr + KV_HEADS * BLOCK * DIM + offset, v, mask=mask)


@triton.jit
@no_type_check
def to_stored(x, factor, dtype: tl.constexpr):
    """Return values as a cache of this dtype stores them; for uint8, the e4m3 codes nearest to `x * factor`.

    Ties round to the even code; values beyond 448 get the largest code; NaN stays NaN.
    """
    if dtype == tl.uint8:
        value = x.to(tl.float32) * factor
        size = tl.minimum(tl.abs(value), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        multiple = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF  # of 2**-9, to which this sum is rounded
        code = tl.where(size < 0.015625, multiple, code)
        code = tl.where(value == value, code, 0x7F)
        stored = (((value.to(tl.int32, bitcast=True) >> 24) & 0x80) | code).to(tl.uint8)
    else:
        stored = x
    return stored
