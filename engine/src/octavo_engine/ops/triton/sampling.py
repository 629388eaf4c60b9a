"""A token for each row of logits in one launch, without a sort: docs/reference/sampling.md defines it.

A program samples one row in two passes. The first pass keeps the largest logit of each of `_TILE` lanes; the `_SURE`-th
largest of these is at most the `_SURE`-th largest logit of the row, and serves as a bound. The second pass copies the
few logits that reach the bound, and sums the weights of all. Bisection over the ordered fp32 numbers then finds, among
the copies, the least logit that top-k or top-p keeps. If the copies may lack a kept token (a larger top-k, a larger
nucleus, or more copies than fit), the whole row is bisected instead, with one pass for each bit.

Weights are integers, so that their sums are exact in any order, and multiplications are not fused with additions. A
row's token therefore depends only on the row, not on the number of passes; it differs from a CPU's token only where the
last bit of a logarithm decides.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

_TILE = 2048
_SURE = 1024  # at least so many of the largest logits are copied
_MOST = 2048  # most logits that are copied
_LEAST = tl.constexpr(-2139095041)  # index of minus infinity among the ordered fp32 numbers
_NEVER = tl.constexpr(float("-inf"))
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: floats of this size are integers
_EXACT = tl.constexpr(8388608.0)  # 2^23: floats from here on are integers
_LOG_2 = tl.constexpr(0.6931472)
_LAST_ID = tl.constexpr(2147483647)


def sample(logits: Float[Tensor, "rows vocab"], params: Int[Tensor, "rows 8"]) -> Int[Tensor, " rows"]:
    """Return a token for each row, -1 if the row has NaN or no finite maximum. `params`: a `DRAW` for each row."""
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    copies = torch.empty(rows, _MOST, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, _MOST, dtype=torch.int32, device=logits.device)
    sample_kernel[(rows,)](
        *(tokens, logits, params, copies, ids, logits.stride(0)),
        VOCAB=vocab,
        TILE=_TILE,
        SURE=min(_SURE, vocab),
        MOST=_MOST,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return tokens


@triton.jit
@no_type_check
def load_logits(row_ptr, at, VOCAB: tl.constexpr, TILE: tl.constexpr):
    ids = at + tl.arange(0, TILE)
    return ids, tl.load(row_ptr + ids, mask=ids < VOCAB, other=_NEVER)


@triton.jit
@no_type_check
def nth_number(n):
    """Return the n-th fp32 number in ascending order, where number 0 is 0.0."""
    low = n.to(tl.int32)
    return tl.where(low < 0, low ^ 0x7FFFFFFF, low).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def place_of(x):
    """Return the place of an fp32 number in this order: the inverse of `nth_number`."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
@no_type_check
def weights(scaled):
    """Return 2^34 e^scaled as integers."""
    exponent = tl.maximum(scaled * 1.44269504, -60.0)
    whole = (exponent + _ROUND) - _ROUND
    f = exponent - whole
    p = f * 0.0013264727 + 0.009671513
    p = p * f + 0.055507336
    p = p * f + 0.24022242
    p = p * f + 0.693147
    p = p * f + 1.0
    power = ((whole.to(tl.int32) + (34 + 127)) << 23).to(tl.float32, bitcast=True)
    weight = p * power
    return tl.where(weight < _EXACT, (weight + _EXACT) - _EXACT, weight).to(tl.int64)


@triton.jit
@no_type_check
def count_from(row_ptr, cut, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Count the logits >= `cut`, which is finite."""
    count = tl.zeros([TILE], tl.int32)
    for at in range(0, VOCAB, TILE):
        _, x = load_logits(row_ptr, at, VOCAB, TILE)
        count += (x >= cut).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
@no_type_check
def weigh_above(row_ptr, above, cut, least, best, inverse, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Sum the weights of the logits that are larger than `above`, among those that `cut` and min-p keep."""
    total = tl.zeros([TILE], tl.int64)
    for at in range(0, VOCAB, TILE):
        _, x = load_logits(row_ptr, at, VOCAB, TILE)
        scaled = (x - best) * inverse
        kept = (x > above) & (x >= cut) & (scaled >= least)
        total += tl.where(kept, weights(scaled), 0)
    return tl.sum(total, 0)


@triton.jit
@no_type_check
def random_bits(ids, low, high):
    b = ids.to(tl.uint32) * 0x9E3779B9 + low
    b = (b ^ (b >> 16)) * 0x7FEB352D
    b = (b ^ (b >> 15) ^ high) * 0x846CA68B
    return b ^ (b >> 16)


@triton.jit
@no_type_check
def noise_bound(bits):
    """Return an upper bound of the noise that these bits give; the bound is tight where the noise is large."""
    inverted = ((bits ^ 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32)
    return (151.0 * _LOG_2 + 0.001) - inverted.to(tl.int32, bitcast=True).to(tl.float32) * (_LOG_2 / 8388608.0)


@triton.jit
@no_type_check
def noise(bits):
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
@no_type_check
def best_token(row_ptr, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return each lane's largest logit, the row's largest logit and its token, and whether the row has NaN or no finite
    maximum."""
    best_each = tl.full([TILE], _NEVER, tl.float32)
    first_each = tl.full([TILE], _LAST_ID, tl.int32)
    unordered = tl.zeros([TILE], tl.int32)
    for at in range(0, VOCAB, TILE):
        ids, x = load_logits(row_ptr, at, VOCAB, TILE)
        unordered |= (x != x).to(tl.int32)
        first_each = tl.where(x > best_each, ids, first_each)
        best_each = tl.where(x > best_each, x, best_each)
    best = tl.max(best_each, 0)
    token = tl.min(tl.where(best_each == best, first_each, _LAST_ID), 0)
    return best_each, best, token, (tl.max(unordered, 0) > 0) | (best == float("inf")) | (best == _NEVER)


@triton.jit
@no_type_check
def nth_largest(values, n, best):
    """Return the n-th largest of `values`, which have no NaN: the largest number that at least n values reach."""
    low = tl.cast(_LEAST, tl.int64)
    high = place_of(best)
    while low < high:
        middle = (low + high + 1) >> 1
        reached = tl.sum((values >= nth_number(middle)).to(tl.int32), 0) >= n
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return nth_number(low)


@triton.jit
@no_type_check
def copy_largest(
    row_ptr,
    copies_ptr,
    ids_ptr,
    bound,
    least,
    best,
    inverse,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Copy the logits >= `bound`, as many as fit; return how many there are, and the sum of the row's weights."""
    count = 0
    total = tl.zeros([TILE], tl.int64)
    for at in range(0, VOCAB, TILE):
        ids, x = load_logits(row_ptr, at, VOCAB, TILE)
        scaled = (x - best) * inverse
        total += tl.where((x > _NEVER) & (scaled >= least), weights(scaled), 0)
        chosen = ((x >= bound) & (x > _NEVER)).to(tl.int32)
        if tl.max(chosen, 0) > 0:
            place = count + tl.cumsum(chosen, 0) - chosen
            fits = (chosen > 0) & (place < MOST)
            tl.store(copies_ptr + place, x, mask=fits)
            tl.store(ids_ptr + place, ids, mask=fits)
            count += tl.sum(chosen, 0)
    tl.debug_barrier()  # other threads read the copies
    return count, tl.sum(total, 0)


@triton.jit
@no_type_check
def draw_among(
    copies_ptr,
    ids_ptr,
    count,
    total,
    bound,
    top_k,
    top_p,
    least,
    best,
    inverse,
    low_key,
    high_key,
    MOST: tl.constexpr,
):
    """Return the token that `draw` would return, computed from the copies, and whether the copies have all kept tokens.

    `top_k`: 0 is off. `total`: sum of the weights of the whole row. The copies are the logits >= `bound`.
    """
    lanes = tl.arange(0, MOST)
    x = tl.load(copies_ptr + lanes, mask=lanes < count, other=_NEVER)
    ids = tl.load(ids_ptr + lanes, mask=lanes < count, other=_LAST_ID)
    scaled = (x - best) * inverse
    alive = (x > _NEVER) & (scaled >= least)
    weight = tl.where(alive, weights(scaled), 0)
    cut = bound
    if top_k > 0:
        cut = nth_largest(x, top_k, best)
        total = tl.sum(tl.where(x >= cut, weight, 0), 0)
    target = top_p * total.to(tl.float64)
    above_bound = tl.sum(tl.where((x > bound) & (x >= cut), weight, 0), 0)
    is_complete = (count <= MOST) & ((top_k > 0) | (above_bound.to(tl.float64) >= target))
    if top_p < 1.0:
        low = place_of(cut)
        high = place_of(best)
        while low < high:
            middle = (low + high) >> 1
            above = tl.sum(tl.where((x > nth_number(middle)) & (x >= cut), weight, 0), 0)
            within = above.to(tl.float64) < target
            high = tl.where(within, middle, high)
            low = tl.where(within, low, middle + 1)
        cut = nth_number(low)
    sums = tl.where(alive & (x >= cut), scaled + noise(random_bits(ids, low_key, high_key)), _NEVER)
    return tl.min(tl.where(sums == tl.max(sums, 0), ids, _LAST_ID), 0), is_complete


@triton.jit
@no_type_check
def draw(row_ptr, cut, least, best, inverse, low, high, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return the kept token with the largest sum of scaled logit and noise; only candidates near it need logarithms."""
    sums = tl.full([TILE], _NEVER, tl.float32)
    tokens = tl.full([TILE], _LAST_ID, tl.int32)
    for at in range(0, VOCAB, TILE):
        ids, x = load_logits(row_ptr, at, VOCAB, TILE)
        scaled = (x - best) * inverse
        bits = random_bits(ids, low, high)
        kept = (x >= cut) & (scaled >= least) & (scaled + noise_bound(bits) >= tl.max(sums, 0))
        if tl.max(kept.to(tl.int32), 0) > 0:
            new = tl.where(kept, scaled + noise(bits), _NEVER)
            tokens = tl.where(new > sums, ids, tokens)
            sums = tl.maximum(sums, new)
    return tl.min(tl.where(sums == tl.max(sums, 0), tokens, _LAST_ID), 0)


@triton.jit
@no_type_check
def top_k_cut(row_ptr, top_k, best, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return the k-th largest logit: the largest number that at least k logits reach."""
    low = tl.cast(_LEAST, tl.int64)
    high = place_of(best)
    while low < high:
        middle = (low + high + 1) >> 1
        reached = count_from(row_ptr, nth_number(middle), VOCAB, TILE) >= top_k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return nth_number(low)


@triton.jit
@no_type_check
def top_p_cut(row_ptr, top_p, cut, least, best, inverse, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return the least cut above which lies less than top_p of the weight."""
    total = weigh_above(row_ptr, _NEVER, cut, least, best, inverse, VOCAB, TILE)
    target = top_p * total.to(tl.float64)
    low = place_of(cut)
    high = place_of(best)
    while low < high:
        middle = (low + high) >> 1
        above = weigh_above(row_ptr, nth_number(middle), cut, least, best, inverse, VOCAB, TILE)
        within = above.to(tl.float64) < target
        high = tl.where(within, middle, high)
        low = tl.where(within, low, middle + 1)
    return nth_number(low)


@triton.jit
@no_type_check
def sample_kernel(
    tokens_ptr,  # [rows] int64
    logits_ptr,  # [rows, VOCAB] fp32; rows of `stride`
    params_ptr,  # [rows, 8] int32: `DRAW`s
    copies_ptr,  # [rows, MOST] fp32: the largest logits of a row
    ids_ptr,  # [rows, MOST] int32: their tokens
    stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    SURE: tl.constexpr,
    MOST: tl.constexpr,
):
    row = tl.cast(tl.program_id(0), tl.int64)
    row_ptr = logits_ptr + row * stride
    best_each, best, token, is_broken = best_token(row_ptr, VOCAB, TILE)
    row_params = params_ptr + row * 8
    inverse = tl.load(row_params + 4).to(tl.float32, bitcast=True)
    if (inverse > 0) & (is_broken == 0):
        least = tl.load(row_params + 5).to(tl.float32, bitcast=True)
        top_k = tl.load(row_params + 6)
        top_k = tl.where(top_k < VOCAB, top_k, 0)
        top_p = tl.load((row_params + 2).to(tl.pointer_type(tl.float64)))
        low = tl.load(row_params).to(tl.uint32, bitcast=True)
        high = tl.load(row_params + 1).to(tl.uint32, bitcast=True)
        is_drawn = 0
        if ((top_k > 0) | (top_p < 1.0)) & (top_k <= SURE):
            bound = nth_largest(best_each, SURE, best)
            copies, ids = copies_ptr + row * MOST, ids_ptr + row * MOST
            count, total = copy_largest(row_ptr, copies, ids, bound, least, best, inverse, VOCAB, TILE, MOST)
            token, is_complete = draw_among(
                *(copies, ids, count, total, bound, top_k, top_p, least, best, inverse, low, high, MOST)
            )
            is_drawn = is_complete.to(tl.int32)
        if is_drawn == 0:
            cut = tl.cast(_NEVER, tl.float32)
            if top_k > 0:
                cut = top_k_cut(row_ptr, top_k, best, VOCAB, TILE)
            if top_p < 1.0:
                cut = top_p_cut(row_ptr, top_p, cut, least, best, inverse, VOCAB, TILE)
            token = draw(row_ptr, cut, least, best, inverse, low, high, VOCAB, TILE)
    tl.store(tokens_ptr + row, tl.where(is_broken, -1, token).to(tl.int64))
