"""Tiles of keys of a paged KV cache: the parts of attention that the Triton kernels of prompts and of decodes share.

The rows of a tile of queries are query heads that share one KV head, of one or several queries. The softmax is computed
online (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023).
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from octavo_engine.ops.triton.sizes import next_power_of_2

_LOG2_E = tl.constexpr(1.4426950408889634)
MIN_DOT = 16  # the least size of each dimension of a product
#: Bytes of a tile of K. The pipeline's tiles of K and V fit into the 99 KiB of shared memory of sm_86 and sm_89.
_KEY_TILE_BYTES = 16 << 10


#: Values of all query heads of a program for one query; their sums are fp32 and must fit into its registers.
MOST_VALUES = 16 << 10


def heads_of_program(group: int, head_dim: int) -> int:
    """Return how many of the `group` query heads that share a KV head a program computes, a divisor of `group`."""
    most = max(1, MOST_VALUES // next_power_of_2(head_dim))
    return next(heads for heads in range(min(group, most), 0, -1) if group % heads == 0)


def tile_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many keys a tile of K has."""
    row_bytes = next_power_of_2(head_dim) * dtype.itemsize
    return max(MIN_DOT, min(64, _KEY_TILE_BYTES // row_bytes))


@triton.jit
@no_type_check
def find_sequence(starts_ptr, num_seqs, item, QUERIES: tl.constexpr):
    """Return the last sequence whose first item is at most `item`. Sequence i starts at item starts[i], or, if items
    are tiles of QUERIES queries, at starts[i] // QUERIES + i."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(starts_ptr + middle)
        if QUERIES > 0:
            first = first // QUERIES + middle
        if first <= item:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
@no_type_check
def attend_keys(
    q,  # [ROWS, DIM_ROW]
    position,  # [ROWS]: of the query of each row
    cache_ptr,  # [blocks, 2, KV_HEADS, BLOCK, DIM], contiguous
    table_ptr,  # the blocks of the sequence
    kv_head,
    first,  # a multiple of KEYS
    end,
    scale,
    v_scale,  # of an e4m3 cache; `scale` includes K's
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_E4M3: tl.constexpr,  # of the GPU
):
    """Attend to the keys [first, end); return each row's largest score, sum of weights and weighted values."""
    dims = tl.arange(0, DIM_ROW)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_ROW], tl.float32)
    for at in tl.range(first, end, KEYS):
        key = at + tl.arange(0, KEYS)
        block = tl.load(table_ptr + key // BLOCK, mask=key < end, other=0).to(tl.int64)
        offset = block * (2 * KV_HEADS * BLOCK * DIM) + (kv_head * BLOCK + key % BLOCK) * DIM
        kv_mask = (key < end)[:, None] & (dims < DIM)[None, :]
        k_ptrs = cache_ptr + offset[:, None] + dims[None, :]
        k = stored_values(tl.load(k_ptrs, mask=kv_mask, other=0), q.dtype, HAS_E4M3)
        score = masked_scores(q, k, key, position, scale, WINDOW, SOFTCAP)
        v = stored_values(tl.load(k_ptrs + KV_HEADS * BLOCK * DIM, mask=kv_mask, other=0), q.dtype, HAS_E4M3)
        best, total, acc = add_keys(best, total, acc, score, v)
    if cache_ptr.dtype.element_ty == tl.uint8:
        acc = acc * v_scale
    return best, total, acc


@triton.jit
@no_type_check
def stored_values(stored, dtype: tl.constexpr, HAS_E4M3: tl.constexpr):
    """Return stored keys or values in `dtype`. Bytes are e4m3 codes: they are converted, and NaN stays NaN.

    On a GPU without instructions for e4m3, the bits of a code are shifted. This gives a number that is too small by a
    factor of 2**120 in bf16, or 2**8 in fp16, so it is multiplied by that factor.
    """
    if stored.dtype != tl.uint8:
        values = stored
    elif HAS_E4M3:
        values = stored.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        bits = stored.to(tl.int16)
        size = bits & 0x7F
        sign_or_nan = ((bits & 0x80) << 8) | -((size + 1) >> 7)  # 0xFFFF is NaN
        if dtype == tl.bfloat16:
            small = (sign_or_nan | (size << 4)).to(tl.bfloat16, bitcast=True)
            values = small * tl.full([], 2.0**120, tl.bfloat16)
        else:
            small = (sign_or_nan | (size << 7)).to(tl.float16, bitcast=True)
            values = (small * tl.full([], 256.0, tl.float16)).to(dtype)
    return values


@triton.jit
@no_type_check
def masked_scores(q, k, key, position, scale, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):
    """Compute scores to the base 2, -inf where a query does not see a key."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0.0:
        score = SOFTCAP * (2.0 * tl.sigmoid(score * (2.0 / SOFTCAP)) - 1.0)  # tanh
    visible = key[None, :] <= position[:, None]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(visible, score * _LOG2_E, float("-inf"))


@triton.jit
@no_type_check
def add_keys(best, total, acc, score, v):
    """Add a tile of keys to the running maximum, sum and weighted values of each row."""
    new_best = tl.maximum(best, tl.max(score, 1))
    safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that sees no key yet
    weight = tl.exp2(score - safe_best[:, None])
    kept = tl.exp2(best - safe_best)
    total = total * kept + tl.sum(weight, 1)
    acc = acc * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new_best, total, acc
