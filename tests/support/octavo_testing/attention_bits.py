"""Attention as `native/paged_attention.cpp` defines it, bit for bit, in torch: each product and sum in its order."""

from dataclasses import dataclass

import torch
from octavo_engine.ops.attention import AttentionSpec
from octavo_engine.ops.cpu_level import Level
from octavo_engine.ops.native_attention import NativeBackend
from octavo_engine.ops.native_library import load_library
from torch import Tensor

from octavo_testing.attention_cases import SeqShape, make_batch, make_spec, random_qkv

PART, UNIT = 256, 16
LOG2E = torch.tensor(1.4426950408889634)
MAGIC = 12582912.0
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXP2 = (1.3264727e-3, 9.6715126e-3, 5.5507337e-2, 2.4022242e-1, 6.9314698e-1, 1.0)
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
SPECS = {
    "smollm2": make_spec(heads=9, kv_heads=3),
    "window": make_spec(heads=4, kv_heads=2, dim=80, window=300),
    "odd window": make_spec(heads=2, kv_heads=2, dim=36, window=7),
    "odd head": make_spec(heads=2, kv_heads=1, dim=37, window=65),
    "softcap": make_spec(heads=16, kv_heads=1, dim=40, softcap=5.0),
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The instructions of a level. `fuses`: a * b + c is rounded once. `flushes`: bf16 products take denormals as 0."""

    fuses: bool
    flushes: bool

    @classmethod
    def of_level(cls, level: Level) -> "Arithmetic":
        return cls(level.name != "x86-64", "avx512_bf16" in level.needs)

    def multiply_add(self, a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
        b, c = torch.as_tensor(b, dtype=torch.float32), torch.as_tensor(c, dtype=torch.float32)
        return fused(a, b, c) if self.fuses else a * b + c

    def add_products(self, total: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        """Add a[..., i] * b[..., i] in order, of bf16 the odd one of each pair first."""
        order = list(range(a.shape[-1]))
        if dtype == torch.bfloat16:
            order = [i for pair in range(0, len(order), 2) for i in (pair + 1, pair) if i < len(order)]
        flushes = self.flushes and dtype == torch.bfloat16
        for i in order:
            left, right = a[..., i], b[..., i]
            if flushes:
                left, right = flush(left), flush(right)
            total = self.multiply_add(left, right, total)
            total = flush(total) if flushes else total
        return total

    def polynomial(self, x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
        result = torch.full_like(x, coefficients[0])
        for coefficient in coefficients[1:]:
            result = self.multiply_add(result, x, coefficient)
        return result

    def exp2(self, x: Tensor) -> Tensor:
        shifted = x + MAGIC
        power = self.polynomial(x - (shifted - MAGIC), EXP2)
        bits = power.view(torch.int32) + (shifted.view(torch.int32) << 23)
        return torch.where(x < -126, 0.0, bits.view(torch.float32))

    def tanh(self, x: Tensor) -> Tensor:
        e = self.exp(2 * x.clamp(-9, 9))
        return (e - 1) / (e + 1)

    def exp(self, x: Tensor) -> Tensor:
        n = self.multiply_add(x, 1.44269504089, MAGIC) - MAGIC
        r = self.multiply_add(-n, 0.693359375, x)
        r = self.multiply_add(-n, -2.12194440e-4, r)
        p = self.multiply_add(self.polynomial(r, EXP), r * r, r) + 1
        return p * ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of fp32, rounded once: the sum in fp64 is rounded to odd, so that its rounding adds no error."""
    product, c = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(torch.int64)
    moved = bits + torch.where((error > 0) == (total > 0), 1, -1)
    is_even = (bits & 1 == 0) & (error != 0) & total.isfinite()
    return torch.where(is_even, moved, bits).view(torch.float64).float()


def flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < SMALLEST_NORMAL, 0.0, x)


def attention_bits(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Attend with the queries of the last tokens over all keys. q: [tokens, heads, head_dim]; k, v of one sequence."""
    dtype, group = q.dtype, spec.num_heads // spec.kv.num_kv_heads
    q, k, v = (x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))  # [heads, keys, head_dim]
    outputs = [
        _attend_row(spec, q[i], k, v, position, dtype, arithmetic)
        for i, position in enumerate(range(k.shape[1] - len(q), k.shape[1]))
    ]
    return torch.stack(outputs).to(dtype)


def _attend_row(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, position: int, dtype: torch.dtype, arithmetic: Arithmetic
) -> Tensor:
    oldest = 0 if spec.kv.window is None else max(0, position + 1 - spec.kv.window)
    best, total, sums = torch.full((len(q),), -torch.inf), torch.zeros(len(q)), torch.zeros_like(q)
    for first in range(oldest // PART * PART, position + 1, PART):
        begin, end = max(first, oldest), min(first + PART, position + 1)
        begin -= begin % UNIT  # unseen keys add 0
        keys, values = k[:, begin:end], v[:, begin:end]
        is_seen = torch.arange(begin, end) >= oldest
        part = _attend_part(spec, q, keys, values, is_seen, dtype, arithmetic)
        larger = part[0] > best
        weight = arithmetic.exp2(torch.where(larger, best - part[0], part[0] - best))
        total = _fold(arithmetic, larger, weight, total, part[1])
        sums = _fold(arithmetic, larger[:, None], weight[:, None], sums, part[2])
        best = torch.maximum(best, part[0])
    return sums / total[:, None]


def _fold(arithmetic: Arithmetic, larger: Tensor, weight: Tensor, before: Tensor, part: Tensor) -> Tensor:
    return arithmetic.multiply_add(torch.where(larger, before, part), weight, torch.where(larger, part, before))


def _attend_part(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_seen: Tensor,
    dtype: torch.dtype,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = arithmetic.add_products(torch.zeros(k.shape[:2]), q[:, None], k, dtype)
    scale = torch.tensor(spec.scale, dtype=torch.float32)
    factor = scale * LOG2E
    if spec.softcap:
        cap = torch.tensor(spec.softcap, dtype=torch.float32)
        scores, factor = arithmetic.tanh(scores * scale / cap) * (cap * LOG2E), torch.tensor(1.0)
    scores = torch.where(is_seen, scores, -torch.inf)
    best = scores.amax(1) * factor
    weights = arithmetic.exp2(arithmetic.multiply_add(scores, factor, -best[:, None]))
    lanes = torch.zeros(len(q), UNIT)
    for unit in weights.split(UNIT, dim=1):
        lanes[:, : unit.shape[1]] += unit
    while lanes.shape[1] > 1:
        left, right = lanes.chunk(2, dim=1)
        lanes = left + right
    weights = weights.to(dtype).float()
    sums = arithmetic.add_products(torch.zeros_like(q), weights[:, None], v.transpose(1, 2), dtype)
    return best, lanes[:, 0], sums


def attend_to_prompt(spec: AttentionSpec, level: Level, tokens: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of a prompt in blocks that earlier owners left full of NaN, and its Q, K and V."""
    qkv = [*random_qkv(spec, tokens, dtype, seed=tokens)]
    backend = NativeBackend(load_library("g++", level), [spec.kv], 32, dtype)
    batch, num_blocks = make_batch([SeqShape(0, tokens)], 32)
    backend.allocate(num_blocks)
    payload = torch.full((num_blocks, backend.bytes_per_block()), 0xFF, dtype=torch.uint8)
    backend.swap_in([(i, i) for i in range(num_blocks)], payload)
    backend.begin_step(batch)
    return backend.attend(spec, *qkv, batch), qkv
