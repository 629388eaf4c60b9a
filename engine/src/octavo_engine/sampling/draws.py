"""Version 2 of the draw: one token per row after temperature, min-p, top-k and top-p, defined in
docs/reference/sampling.md.

A kernel computes it in one call, in C++ or on a GPU; the torch functions of this file serve hosts without a compiler,
and are its reference. All keep the same tokens exactly, because the masses of top-p are sums of integers. A row's token
depends only on the row.
"""

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from octavo_engine.devices.transfers import Copy, keep
from octavo_engine.ops.sampling import DrawParams, sample_natively
from octavo_engine.ops.triton_devices import runs_triton
from octavo_engine.wire.sampling import DRAW_VERSION

_FIRST_LOOK = 64
_VALUES_AT_A_TIME = 1 << 22  # a draw holds up to 60 bytes per logit
_NEVER = float("-inf")
#: 2**x between -0.5 and 0.5, from the highest power, with a relative error of 1e-7. The kernel has the same numbers.
_EXP2 = (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0)
_WEIGHT_BITS = 34
_WEYL = np.uint64(0x9E3779B97F4A7C15)
_DOMAIN = np.uint64(0x6F637461766F0000 | DRAW_VERSION)  # "octavo"


def choose_tokens(logits: Float[Tensor, "rows vocab"], params: DrawParams, copy: Copy = keep) -> Int[Tensor, " rows"]:
    """Return a token for each row, -1 if the row has NaN or no finite maximum. `copy`: copies parameters to the device.

    A GPU's kernel is started without waiting for the device.
    """
    if runs_triton(logits):
        from octavo_engine.ops.triton import sampling  # Triton is missing on most machines without a GPU

        return sampling.sample(logits, copy(torch.from_numpy(params.view(np.int32).reshape(-1, 8))))
    tokens = sample_natively(logits, params)
    return choose_tokens_reference(logits, params) if tokens is None else tokens


def choose_tokens_reference(logits: Float[Tensor, "rows vocab"], params: DrawParams) -> Int[Tensor, " rows"]:
    finite = logits.amax(-1).isfinite()
    tokens = logits.argmax(-1)  # the lowest id of equal logits
    random = np.flatnonzero(params["temperature"] > 0)
    size = max(1, _VALUES_AT_A_TIME // logits.shape[1])
    for part in (random[start : start + size] for start in range(0, len(random), size)):
        rows = _on(part, logits.device)
        tokens[rows] = _draw(logits[rows], params[part])
    return tokens.masked_fill_(~finite, -1)


def kept_tokens(logits: Float[Tensor, "rows vocab"], params: DrawParams) -> Bool[Tensor, "rows vocab"]:
    """Return the tokens that min-p, top-k and top-p keep."""
    kept = _scaled(logits, logits.amax(-1), params) >= _on(params["least_scaled"], logits.device)[:, None]
    some = np.flatnonzero((params["top_k"] > 0) | (params["top_p"] < 1.0))
    if len(some):
        rows = _on(some, logits.device)
        kept[rows] &= logits[rows] >= _cut(logits[rows], params[some])[:, None]
    return kept


def gumbel_noise(keys: npt.NDArray[np.uint64], vocab: int, device: torch.device) -> Float[Tensor, "rows vocab"]:
    """Return -ln(-ln(u)), rounded to fp32, with u of the 32 bits that the key and the token's id give."""
    low, high = _on(np.ascontiguousarray(keys).view(np.int32).reshape(-1, 2), device)[:, :, None].unbind(1)
    bits = torch.arange(vocab, dtype=torch.int32, device=device).mul_(_signed(0x9E3779B9)) + low
    bits.bitwise_xor_(_shifted(bits, 16)).mul_(0x7FEB352D)
    bits.bitwise_xor_(_shifted(bits, 15)).bitwise_xor_(high).mul_(_signed(0x846CA68B))
    bits.bitwise_xor_(_shifted(bits, 16)).bitwise_xor_(_signed(1 << 31))  # the signed number is now bits - 2**31
    uniform = bits.double().add_(2**31 + 0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_().float()


def token_weights(scaled: Tensor) -> Float[Tensor, "rows values"]:
    """Return 2**34 * exp(scaled) as integers in float64, whose sums are exact up to 2**19 tokens.

    Each operation rounds to fp32, so that all devices get equal weights.
    """
    exponent = (scaled * 1.44269504).clamp_(min=-60.0)
    whole = exponent.round()
    fraction = exponent.sub_(whole)
    power = torch.full_like(fraction, _EXP2[0])
    for coefficient in _EXP2[1:]:
        power.mul_(fraction).add_(coefficient)
    scale = (whole.int() + (_WEIGHT_BITS + 127)).bitwise_left_shift_(23).view(torch.float32)
    return power.mul_(scale).round_().double()


def _draw(logits: Tensor, params: DrawParams) -> Int[Tensor, " rows"]:
    sums = _scaled(logits, logits.amax(-1), params)
    sums.masked_fill_(~kept_tokens(logits, params), _NEVER)
    return sums.add_(gumbel_noise(params["key"], logits.shape[1], logits.device)).argmax(-1)


def _scaled(logits: Tensor, best: Float[Tensor, " rows"], params: DrawParams) -> Tensor:
    """Return the logits less the row's best, divided by the temperature (0, greedy: not divided)."""
    scale = np.where(params["temperature"] > 0, params["inverse_temperature"], np.float32(1))
    return (logits - best[:, None]).mul_(_on(scale, logits.device)[:, None])


def _cut(logits: Tensor, params: DrawParams) -> Float[Tensor, " rows"]:
    """Return each row's least logit that top-k and top-p keep. Only rows that keep over 64 logits are sorted."""
    rows, vocab = logits.shape
    params = params.copy()
    params["top_k"][params["top_k"] >= vocab] = 0
    top_k = _on(np.where(params["top_k"] > 0, params["top_k"], vocab), logits.device)
    best, cut = logits.amax(-1), torch.empty(rows, device=logits.device)
    total = _total(logits, best, params)
    pending = np.arange(rows)
    for size in (min(_FIRST_LOOK, vocab), vocab):
        at = _on(pending, logits.device)
        values, k = _largest(logits[at], size), top_k[at, None]
        least = values.gather(1, k.clamp(max=size) - 1)
        cut[at], length = _top_p_cut(values, least, best[at], total[at], params[pending])
        decided = torch.where(k[:, 0] < vocab, values[:, -1] < least[:, 0], length < size)
        pending = pending[~decided.cpu().numpy()]
        if not len(pending):
            break
    return cut


def _top_p_cut(
    values: Float[Tensor, "rows size"], least: Float[Tensor, "rows 1"], best: Tensor, total: Tensor, params: DrawParams
) -> tuple[Float[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Return the least kept value of sorted values, and how many are kept. `total`: mass of rows without top-k."""
    scaled, device = _scaled(values, best, params), values.device
    inside = (values >= least) & (scaled >= _on(params["least_scaled"], device)[:, None])
    weights = token_weights(scaled).masked_fill_(~inside, 0.0)
    mass = torch.where(_on(params["top_k"] > 0, device), weights.sum(-1), total)
    top_p = _on(params["top_p"], device)
    before = weights.cumsum(-1) - weights
    kept = inside & ((before < (top_p * mass)[:, None]) | (top_p >= 1.0)[:, None])
    length = kept.sum(-1).clamp_(min=1)
    return values.gather(1, length[:, None] - 1)[:, 0], length


def _total(logits: Tensor, best: Tensor, params: DrawParams) -> Float[Tensor, " rows"]:
    """Return the sum of weights that min-p keeps; 0 for rows with top-k, whose sum is that of the top k instead."""
    total = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    some = np.flatnonzero(params["top_k"] == 0)
    if len(some):
        rows, params = _on(some, logits.device), params[some]
        scaled = _scaled(logits[rows], best[rows], params)
        excluded = scaled < _on(params["least_scaled"], logits.device)[:, None]
        total[rows] = token_weights(scaled).masked_fill_(excluded, 0.0).sum(-1)
    return total


def _largest(values: Float[Tensor, "rows vocab"], size: int) -> Float[Tensor, "rows size"]:
    """Return each row's `size` largest values, descending. numpy sorts values without indices 10 times faster."""
    if size < values.shape[1]:
        return values.topk(size).values
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    return torch.from_numpy(-np.sort(-values.numpy(), axis=-1))


def _on(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift int32 as unsigned numbers."""
    return (bits >> count).bitwise_and_((1 << (32 - count)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def seed_keys(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the part of each key that depends only on the seed."""
    return _mix(seeds ^ _DOMAIN)


def draw_keys(of_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a key of 64 bits for each position. `of_seeds`: the `seed_keys`."""
    return _mix(of_seeds + (positions + 1).astype(np.uint64) * _WEYL)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
