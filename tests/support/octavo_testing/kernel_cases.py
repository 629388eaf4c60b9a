"""Calls of the fused Triton kernels on any device, each with what torch computes in fp32 from the same input."""

import torch
from octavo_engine.ops.activation import ACTIVATIONS, act_mul, act_mul_reference
from octavo_engine.ops.norm import RMSWeight, add_rms_norm, rms_norm, rms_norm_reference, rms_weight
from octavo_engine.ops.rope import Rotation, rotate_reference_
from torch import Tensor

from octavo_testing.attention_cases import e4m3_codes, in_reference_layout

#: A kernel's result, and torch's.
Pair = tuple[Tensor, Tensor]
#: Query heads of fused writes, and the scales of K and V in a cache of e4m3.
_HEADS, _SCALES = 6, (0.02, 0.5)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def norm_pairs(rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Pair]:
    """Compute a norm, and one that adds an update before; assert that this one leaves the exact sum."""
    weight = rms_weight(random(size, device=device), 1e-5)
    x, update = (random(rows, size, dtype=dtype, seed=seed, device=device) for seed in range(2))
    total, plain = x + update, rms_norm(x, weight)
    wanted = rms_norm_reference(x.float(), weight)
    added = add_rms_norm(update, x, weight)  # it changes x
    assert torch.equal(x, total), f"size {size}: the sum that an added norm leaves differs from torch's"
    return {"plain": (plain, wanted), "added": (added, rms_norm_reference(total.float(), weight))}


def gate_pair(name: str, rows: int, size: int, dtype: torch.dtype, device: str = "cpu") -> Pair:
    """Compute a gate whose rows are strided."""
    gate_up = 3 * random(rows, 2 * size + 3, dtype=dtype, device=device)[:, : 2 * size]
    return act_mul(gate_up, ACTIVATIONS[name]), act_mul_reference(gate_up.float(), ACTIVATIONS[name])


def angles(tokens: int, size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return a table of cosines and sines, [tokens, 2, 1, size]; models get views of it."""
    angle = random(tokens, size // 2, seed=4)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos, -sin, sin), -1).to(dtype).to(device).view(tokens, 2, 1, size)


def fused_write_pairs(
    dim: int, rotary: int, has_norm: bool, dtype: torch.dtype, device: str = "cpu", *, block_size: int = 16
) -> dict[str, Pair]:
    """Compute the queries, and the cache with keys and values of which every seventh has no slot."""
    from octavo_engine.ops.triton.write_qkv import write_qkv  # norms and gates do without it

    fused_qk, v, slots, norm, table = _fused_write_inputs(dim, rotary, has_norm, dtype, device, block_size)
    cache = random(5, 2, 2, block_size, dim, dtype=dtype, seed=2, device=device)
    used, qk, want = slots >= 0, fused_qk.float().clone(), in_reference_layout(cache)
    if norm is not None:
        qk = rms_norm_reference(qk, norm)
    if rotary:
        rotate_reference_(qk, *table.float().unbind(1))
    for half, x in enumerate((qk[:, _HEADS:], v.float())):
        want[half].flatten(0, 1)[slots[used]] = x[used]
    rotation = Rotation(*table.unbind(1)) if rotary else None
    queries = write_qkv(cache, fused_qk, v, slots, norm, rotation)
    return {"queries": (queries, qk[:, :_HEADS]), "cache": (in_reference_layout(cache), want)}


def fused_code_pairs(
    dim: int, rotary: int, has_norm: bool, dtype: torch.dtype, device: str = "cpu", *, block_size: int = 16
) -> dict[str, Pair]:
    """Compute the keys and values of a cache of e4m3, and the codes of those that the kernel writes in 16 bits."""
    from octavo_engine.ops.triton.write_qkv import write_qkv

    qk, v, slots, norm, table = _fused_write_inputs(dim, rotary, has_norm, dtype, device, block_size)
    rotation = Rotation(*table.unbind(1)) if rotary else None
    caches = [torch.zeros(5, 2, 2, block_size, dim, dtype=each, device=device) for each in (dtype, torch.uint8)]
    for cache in caches:
        write_qkv(cache, qk, v, slots, norm, rotation, _SCALES)
    wide, codes = caches[0], caches[1].view(torch.float8_e4m3fn)
    return {
        name: (codes[:, half].float(), e4m3_codes(wide[:, half], _SCALES[half]).float())
        for half, name in enumerate(("keys", "values"))
    }


def _fused_write_inputs(
    dim: int, rotary: int, has_norm: bool, dtype: torch.dtype, device: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor, RMSWeight | None, Tensor]:
    """Return queries and keys, values, slots, the norm and the table of angles."""
    tokens = 33
    norm = rms_weight((1 + random(_HEADS + 2, dim, seed=3) / 10).to(device), 1e-6) if has_norm else None
    fused = random(tokens, _HEADS + 4, dim, dtype=dtype, seed=1, device=device)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(0))[:tokens].to(device)
    slots[::7] = -1
    return fused[:, : _HEADS + 2], fused[:, _HEADS + 2 :], slots, norm, angles(tokens, rotary, dtype, device)
