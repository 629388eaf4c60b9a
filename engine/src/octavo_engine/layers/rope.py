"""Rotary position embedding: a table of cosines and sines up to `max_model_len`, read once per step for all layers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octavo_engine.layers.layer import BuildContext, Layer
from octavo_engine.ops.gather import gather_rows
from octavo_engine.ops.rope import Rotation
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers
from octavo_engine.wire.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotation frequencies of the pairs of rotary dimensions: default, linear, dynamic, llama3, yarn or longrope.

    A frequency is a constant of the loaded model. transformers changes "dynamic" and "longrope" when a sequence grows
    past the original length, which invalidates keys that were cached before; here `max_model_len` fixes them.
    `max_positions`: the checkpoint's own limit. `scaling`: the kind's other parameters, as in `config.json`. `axes`:
    the coordinate of image tokens that each frequency rotates by; () if tokens have a single position.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    original_positions: int
    scaling: Mapping[str, Any]
    axes: tuple[int, ...] = ()


def rope_spec(config: ModelConfig, parameters: Mapping[str, Any]) -> RopeSpec:
    """Build the spec from `parameters`, the result of `sources.model_config.rope_parameters`."""
    numbers, max_positions = ConfigNumbers(config.name, dict(parameters)), config.max_position_embeddings
    return RopeSpec(
        kind=parameters["rope_type"],
        theta=numbers.real("rope_theta", 10000.0),
        rotary_dim=int(config.head_dim * min(1.0, numbers.real("partial_rotary_factor", 1.0))),
        max_positions=max_positions,
        original_positions=numbers.optional(("original_max_position_embeddings",), max_positions),
        scaling=parameters,
        axes=_axes(parameters),
    )


def _axes(parameters: Mapping[str, Any]) -> tuple[int, ...]:
    """Return each frequency's axis (0: time, 1: row, 2: column): the axes are interleaved, or each has a section."""
    sections = parameters.get("mrope_section") or [0, 0, 0]
    if not isinstance(sections, list) or len(sections) != 3 or any(type(length) is not int for length in sections):
        problem = f"mrope_section in config.json must list three whole numbers, got {sections!r:.60}"
        raise StartupError(f"{problem}: correct the file.")
    if not parameters.get("mrope_interleaved"):
        return tuple(i % 3 for i, length in enumerate(sections) for _ in range(length))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections)))


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> tuple[Float[Tensor, " half"], float]:
    """Return the frequencies, and the factor by which cosine and sine are multiplied. Raises StartupError."""
    try:
        frequencies, factor = _frequencies(spec, max_model_len)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if 2 * len(frequencies) == spec.rotary_dim and frequencies.isfinite().all() and math.isfinite(factor):
            return frequencies, factor
        problem = f"they give {len(frequencies)} frequencies for {spec.rotary_dim} dimensions, or infinite ones"
    raise StartupError(
        f"RoPE parameters {dict(spec.scaling)!r:.200} in config.json do not fit type '{spec.kind}': {problem}: correct "
        "the file."
    )


def _frequencies(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    plain = _plain(spec.theta, spec.rotary_dim)
    match spec.kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / spec.scaling["factor"], 1.0
        case "dynamic":
            return _dynamic(spec, max_model_len), 1.0
        case "llama3":
            return _llama3(spec, plain), 1.0
        case "yarn":
            return _yarn(spec)
        case "longrope":
            return _longrope(spec, max_model_len)
    raise StartupError(
        f"rope type '{spec.kind}' is not supported: supported are default, linear, dynamic, llama3, yarn, longrope."
    )


def _plain(theta: float, dim: int) -> Tensor:
    return torch.pow(theta, torch.arange(0, dim, 2).float() / dim).reciprocal()


def _dynamic(spec: RopeSpec, max_model_len: int) -> Tensor:
    """NTK-aware scaling: the base grows with the ratio of `max_model_len` to the original length."""
    factor, dim = spec.scaling["factor"], spec.rotary_dim
    length = max(max_model_len, spec.max_positions)
    stretch = factor * length / spec.max_positions - (factor - 1)
    return _plain(spec.theta * stretch ** (dim / (dim - 2)), dim)


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and interpolate between them."""
    low, high = spec.scaling["low_freq_factor"], spec.scaling["high_freq_factor"]
    factor: float = spec.scaling["factor"]
    turns = plain * (spec.original_positions / (2 * math.pi))  # within the original length
    keep: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(spec: RopeSpec) -> tuple[Tensor, float]:
    scaling, dim, original = spec.scaling, spec.rotary_dim, spec.original_positions
    factor = scaling.get("factor") or spec.max_positions / original

    def dim_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dim_of(float(scaling.get("beta_fast") or 32)), dim_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / ((high - low) or 0.001)).clamp(0, 1)
    plain = _plain(spec.theta, dim)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _longrope(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """Divide each frequency by its factor from the list for contexts beyond or within the original length."""
    scaling, original = spec.scaling, spec.original_positions
    factors = scaling["long_factor" if max_model_len > original else "short_factor"]
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        factor = scaling.get("factor") or spec.max_positions / original
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _plain(spec.theta, spec.rotary_dim) / torch.tensor(factors), float(attention_factor)


class RotaryEmbedding(Layer):
    def __init__(self, spec: RopeSpec, build: BuildContext) -> None:
        super().__init__()
        frequencies, factor = inverse_frequencies(spec, build.max_model_len)
        if spec.axes and len(spec.axes) != len(frequencies):
            problem = f"has {len(spec.axes)} frequencies, but the heads have {len(frequencies)}"
            raise StartupError(f"mrope_section in config.json {problem}: correct the file.")
        self.axes = torch.tensor(4 * spec.axes, dtype=torch.int64, device=build.device)
        if build.device.type == "meta":  # arithmetic on meta tensors would import torch's compiler, for over a second
            shape = (build.max_model_len, 4 * len(frequencies))
            self.table = torch.empty(shape, dtype=build.dtype, device="meta")
            return
        # Computed on the CPU, so that every device gets the same bits.
        angles = torch.arange(build.max_model_len).float()[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).flatten(1)
        self.table = both.to(build.device, build.dtype)  # [max_model_len, 2 * rotary_dim]

    def __call__(self, positions: Int[Tensor, " tokens"] | Int[Tensor, "axes tokens"]) -> Rotation:
        rows = gather_rows(self.table, positions.flatten())
        if positions.dim() == 2:
            by_axis = rows.view(*positions.shape, -1)
            rows = by_axis.gather(0, self.axes.expand(1, *by_axis.shape[1:]))[0]
        cos, sin = rows.view(-1, 2, 1, self.table.shape[1] // 2).unbind(1)
        return Rotation(cos, sin)

    def weights_bytes(self) -> int:
        return self.table.numel() * self.table.dtype.itemsize
