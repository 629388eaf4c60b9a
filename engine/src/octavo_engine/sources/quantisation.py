"""`read_quantisation`: how a checkpoint's layers are quantised, or a refusal that names its method."""

from collections.abc import Callable

from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.quantised_config import (
    QuantisedConfig,
    QuantizationSettings,
    read_awq_config,
    read_bitsandbytes_config,
    read_fp8_config,
    read_gptq_config,
)
from octavo_engine.wire.errors import StartupError

#: Format -> type and numbers of bits of the weights.
_LAYOUTS = {"pack-quantized": ("int", (4, 8)), "int-quantized": ("int", (8,)), "float-quantized": ("float", (8,))}
#: Type of the weights -> strategies.
_STRATEGIES = {"int": ("group", "channel"), "float": ("tensor", "channel", "block")}
_OTHERS = "use a checkpoint without it, or an unquantised one"


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
    """Return the bits of the activations for which the checkpoint was made; None if they are not quantised."""
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


def read_quantisation(files: ModelFiles) -> QuantisedConfig | None:
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
