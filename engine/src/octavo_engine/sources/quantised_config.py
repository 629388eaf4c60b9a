"""Reads how the layers of a checkpoint were quantised: from `quantization_config` in config.json."""

from dataclasses import dataclass
from typing import Any

from octavo_engine.wire.errors import StartupError

GPTQ_BITS = (4, 8)
AWQ_BITS = (4,)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedConfig:
    """`method`: as in vLLM. `group_size`: inputs that share a scale; None: all of a layer.

    `symmetric`: all zero points are 2^(bits - 1). `zero_offset`: 1 in the first version of GPTQ's format, which stores
    an integer of packed zero points less one in each. `block_outputs`: outputs that share scales; None: each output has
    its own, or the whole layer has one. `ignored`: parts of the names of layers that are not quantised, or
    expressions after "re:", which are not evaluated, as one of a hostile checkpoint may never end.
    `activation_bits`: of the activations that the checkpoint was made for, if they are quantised. `quantised_cache`: it
    was also made for a quantised KV cache.
    """

    method: str
    layout: str
    bits: int
    group_size: int | None
    symmetric: bool
    zero_offset: int = 0
    block_outputs: int | None = None
    ignored: tuple[str, ...] = ()
    activation_bits: int | None = None
    quantised_cache: bool = False


class QuantizationSettings:
    """`quantization_config` of a model `name`, the values of which are checked when they are read."""

    def __init__(self, name: str, method: str, config: dict[str, Any]) -> None:
        self.name, self.method, self.config = name, method, config

    def get(self, *keys: str, default: Any = None) -> Any:
        return next((self.config[key] for key in keys if key in self.config), default)

    def refuse(self, what: str, remedy: str) -> StartupError:
        return StartupError(f"{self.name}: {self.method} checkpoint: {what}: {remedy}.")

    def of(self, config: dict[str, Any]) -> "QuantizationSettings":
        """Return other settings of the same checkpoint."""
        return QuantizationSettings(self.name, self.method, config)

    def names(self, key: str) -> tuple[str, ...]:
        parts = self.get(key) or ()
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise self.refuse(f"{key}={parts!r} is invalid", "it must be a list of names")
        return tuple(parts)

    def bits(self, accepted: tuple[int, ...]) -> int:
        bits = self.get("bits", "w_bit", "num_bits")
        if type(bits) is not int or bits not in accepted:
            remedy = f"use a checkpoint of {' or '.join(map(str, accepted))} bits"
            raise self.refuse(f"bits={bits!r} is not supported", remedy)
        return bits

    def group_size(self) -> int | None:
        size = self.get("group_size", "q_group_size", default=-1)
        if type(size) is not int or size < -1 or size == 0:
            raise self.refuse(f"group_size={size!r} is invalid", "it must be a positive number, or -1 for one group")
        return None if size == -1 else size

    def block_shape(self, key: str) -> tuple[int, int] | None:
        """Return how many outputs and inputs share a scale; None: the settings have no blocks."""
        shape = self.get(key)
        if shape is None:
            return None
        if not isinstance(shape, list | tuple) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
            raise self.refuse(f"{key}={shape!r} is invalid", "it must be two positive numbers, such as [128, 128]")
        return shape[0], shape[1]


def read_gptq_config(settings: QuantizationSettings) -> QuantisedConfig:
    version = settings.get("checkpoint_format") or ("marlin" if settings.get("is_marlin_format") else "gptq")
    if version not in ("gptq", "gptq_v2"):
        remedy = "use one in the format gptq or gptq_v2"
        raise settings.refuse(f"checkpoint_format={version!r} is not supported", remedy)
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise settings.refuse(f"dynamic={dynamic!r} is invalid", "it must be an object of patterns")
    if changes := [pattern for pattern in dynamic if not pattern.startswith("-:")]:
        remedy = "use a checkpoint whose layers have equal settings"
        raise settings.refuse(f"dynamic={changes[0]!r} is not supported", remedy)
    return QuantisedConfig(
        method="gptq",
        layout="gptq",
        bits=settings.bits(GPTQ_BITS),
        group_size=settings.group_size(),
        symmetric=bool(settings.get("sym", default=True)),
        zero_offset=int(version == "gptq"),
    )


def read_awq_config(settings: QuantizationSettings) -> QuantisedConfig:
    version = str(settings.get("version", default="gemm")).lower()
    if version != "gemm":
        raise settings.refuse(f"version={version!r} is not supported", "use a checkpoint of the version gemm")
    return QuantisedConfig(
        method="awq",
        layout="awq",
        bits=settings.bits(AWQ_BITS),
        group_size=settings.group_size(),
        symmetric=not settings.get("zero_point", default=True),
        ignored=settings.names("modules_to_not_convert"),
    )


def read_fp8_config(settings: QuantizationSettings) -> QuantisedConfig:
    number_format = settings.get("fmt", default="e4m3")
    if number_format != "e4m3":
        raise settings.refuse(f"fmt={number_format!r} is not supported", "use a checkpoint of e4m3")
    scheme = settings.get("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise settings.refuse(f"activation_scheme={scheme!r} is not supported", "use one of dynamic, static")
    outputs, inputs = settings.block_shape("weight_block_size") or (None, None)
    return QuantisedConfig(
        method="fp8",
        layout="float-quantized",
        bits=8,
        group_size=inputs,
        symmetric=True,
        block_outputs=outputs,
        ignored=settings.names("ignored_layers") or settings.names("modules_to_not_convert"),
        activation_bits=8,
        quantised_cache=bool(settings.get("kv_cache_scheme")),
    )


def read_bitsandbytes_config(settings: QuantizationSettings) -> QuantisedConfig:
    has_4, has_8 = (bool(settings.get(f"load_in_{bits}bit", f"_load_in_{bits}bit")) for bits in (4, 8))
    if has_4 == has_8:
        raise settings.refuse(
            f"load_in_4bit={has_4} and load_in_8bit={has_8} are not supported", "correct them: one of them is true"
        )
    codes = settings.get("bnb_4bit_quant_type", default="fp4") if has_4 else "int8"
    if codes not in ("nf4", "fp4", "int8"):
        raise settings.refuse(f"bnb_4bit_quant_type={codes!r} is not supported", "use a checkpoint of nf4 or fp4")
    return QuantisedConfig(
        method="bitsandbytes",
        layout=f"bitsandbytes-{codes}",
        bits=4 if has_4 else 8,
        group_size=None,  # the layers have it
        symmetric=True,
        ignored=settings.names("llm_int8_skip_modules"),
        activation_bits=None if has_4 else 8,
    )
