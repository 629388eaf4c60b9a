"""Reads how the layers of a checkpoint were quantised: from `quantization_config` in config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo_engine.wire.errors import StartupError

if TYPE_CHECKING:
    from octavo_engine.sources.model_files import ModelFiles

GPTQ_BITS = (4, 8)
AWQ_BITS = (4,)
#: Format -> type and numbers of bits of the weights.
_LAYOUTS = {"pack-quantized": ("int", (4, 8)), "int-quantized": ("int", (8,)), "float-quantized": ("float", (8,))}
#: Type of the weights -> strategies.
_STRATEGIES = {"int": ("group", "channel"), "float": ("tensor", "channel", "block")}
_OTHERS = "use a checkpoint without it, or an unquantised one"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedConfig:
    """`method`: name of the method in vLLM. `group_size`: inputs that share a scale; None: all inputs of a layer.

    `symmetric`: all zero points are 2^(bits - 1). `zero_offset`: 1 in the first version of GPTQ's format, which stores
    each zero point minus one. `block_outputs`: outputs that share scales; None: each output has its own, or the whole
    layer has one. `ignored`: substrings of the names of layers that are not quantised, or regular expressions after
    "re:", which are not evaluated, because a malicious one may never end. `activation_bits`: bits of quantised
    activations, if the checkpoint was made for them. `quantised_cache`: the checkpoint was also made for a quantised KV
    cache.
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
    """The `quantization_config` of model `name`; values are checked when they are read."""

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


def read_compressed_config(settings: QuantizationSettings) -> QuantisedConfig:
    """Read how the library compressed-tensors quantised a checkpoint. Raises StartupError with value and remedy."""
    layout = settings.get("format")
    groups = settings.get("config_groups") or {}
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        remedy = "use a checkpoint whose layers have equal settings"
        names = list(groups) if isinstance(groups, dict) else repr(groups)
        raise settings.refuse(f"config_groups of {names} are not supported", remedy)
    layout = group.get("format") or layout
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise settings.refuse(f"format={layout!r} is not supported", f"use one of {', '.join(_LAYOUTS)}")
    for key in ("transform_config", "sparsity_config"):
        if settings.get(key):
            raise settings.refuse(f"{key} is not supported", _OTHERS)
    weights = settings.of(group["weights"])
    kind, bits = _LAYOUTS[layout]
    if weights.get("type", default="int") != kind:
        raise settings.refuse(f"weights of the type {weights.get('type')!r} are not supported", f"use type {kind}")
    strategy = weights.get("strategy") or ("channel" if weights.get("group_size") is None else "group")
    if strategy not in _STRATEGIES[kind]:
        raise settings.refuse(f"strategy={strategy!r} is not supported", f"use one of {', '.join(_STRATEGIES[kind])}")
    block = weights.block_shape("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise settings.refuse("block_structure is missing", "add it to the weights of config_groups in a copy")
    outputs, inputs = block or (None, None)
    return QuantisedConfig(
        method="compressed-tensors",
        layout=layout,
        bits=weights.bits(bits),
        group_size=weights.group_size() if strategy == "group" else inputs,
        symmetric=bool(weights.get("symmetric", default=True)),
        block_outputs=outputs,
        ignored=settings.names("ignore"),
        activation_bits=_activation_bits(settings, group, kind),
        quantised_cache=bool(settings.get("kv_cache_scheme")),
    )


def _activation_bits(settings: QuantizationSettings, group: dict[str, object], kind: str) -> int | None:
    """Return the bits of the activations for which the checkpoint was made; None: they are not quantised."""
    activations = group.get("input_activations")
    if not activations:
        return None
    input_settings = settings.of(activations) if isinstance(activations, dict) else None
    if input_settings is None or input_settings.get("type", default="int") != kind:
        raise settings.refuse(f"input_activations={activations!r} are not supported", _OTHERS)
    return input_settings.bits((4, 8) if kind == "int" else (8,))


METHODS: dict[str, Callable[[QuantizationSettings], QuantisedConfig]] = {
    "gptq": read_gptq_config,
    "awq": read_awq_config,
    "compressed-tensors": read_compressed_config,
    "fp8": read_fp8_config,
    "bitsandbytes": read_bitsandbytes_config,
}


def read_quantisation(files: "ModelFiles") -> QuantisedConfig | None:
    """Return the settings of quantised layers; None for an unquantised checkpoint. Raises StartupError."""
    config = files.config.get("quantization_config") or files.config.get("compression_config")
    if not config:
        return None
    method = config.get("quant_method", "unknown") if isinstance(config, dict) else config
    if not isinstance(config, dict) or not isinstance(method, str) or method not in METHODS:
        raise StartupError(
            f"{files.name}: quantisation method {method!r} (quantization_config) is not supported by this version: "
            f"use an unquantised or a GGUF checkpoint, or one of the methods {', '.join(METHODS)}."
        )
    settings = QuantizationSettings(files.name, method, config)
    if files.load_format != "safetensors":
        raise settings.refuse(f"load format {files.load_format!r} is not supported", "use safetensors files")
    if files.config.get("model_type") == "gpt2":
        remedy = "use an unquantised or a GGUF checkpoint"
        raise settings.refuse("the architecture GPT-2 stores its weights transposed", remedy)
    return METHODS[method](settings)
