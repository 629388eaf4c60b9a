"""`read_quantisation`: how a checkpoint's layers are quantised, or a refusal that names its method."""

from collections.abc import Callable

from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.quantised_config import (
    QuantisedConfig,
    QuantizationSettings,
    read_awq_config,
    read_gptq_config,
)
from octavo_engine.wire.errors import StartupError

_LAYOUTS = {"pack-quantized": (4, 8), "int-quantized": (8,)}
_STRATEGIES = ("group", "channel")
_OTHERS = "use a checkpoint without it, or an unquantised one"


def read_compressed_config(settings: QuantizationSettings) -> QuantisedConfig:
    """Read how the library compressed-tensors quantised a checkpoint. Raises StartupError with value and remedy."""
    layout = settings.get("format")
    groups = settings.get("config_groups") or {}
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        remedy = "use a checkpoint whose layers have equal settings"
        raise settings.refuse(f"config_groups of {list(groups)} are not supported", remedy)
    layout = group.get("format") or layout
    if layout not in _LAYOUTS:
        raise settings.refuse(f"format={layout!r} is not supported", f"use one of {', '.join(_LAYOUTS)}")
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if settings.get(key):
            raise settings.refuse(f"{key} is not supported", _OTHERS)
    weights = settings.of(group["weights"])
    if weights.get("type", default="int") != "int":
        raise settings.refuse(f"weights of the type {weights.get('type')!r} are not supported", "use type int")
    strategy = weights.get("strategy") or ("channel" if weights.get("group_size") is None else "group")
    if strategy not in _STRATEGIES:
        raise settings.refuse(f"strategy={strategy!r} is not supported", f"use one of {', '.join(_STRATEGIES)}")
    return QuantisedConfig(
        method="compressed-tensors",
        layout=layout,
        bits=weights.bits(_LAYOUTS[layout]),
        group_size=weights.group_size() if strategy == "group" else None,
        symmetric=bool(weights.get("symmetric", default=True)),
        activation_bits=_activation_bits(settings, group),
        ignored=settings.names("ignore"),
    )


def _activation_bits(settings: QuantizationSettings, group: dict[str, object]) -> int | None:
    """Return the bits of the activations for which the checkpoint was made; None if they are not quantised."""
    activations = group.get("input_activations")
    if not activations:
        return None
    input_settings = settings.of(activations) if isinstance(activations, dict) else None
    if input_settings is None or input_settings.get("type", default="int") != "int":
        raise settings.refuse(f"input_activations={activations!r} are not supported", _OTHERS)
    return input_settings.bits((4, 8))


METHODS: dict[str, Callable[[QuantizationSettings], QuantisedConfig]] = {
    "gptq": read_gptq_config,
    "awq": read_awq_config,
    "compressed-tensors": read_compressed_config,
}


def read_quantisation(files: ModelFiles) -> QuantisedConfig | None:
    """Return the settings of quantised layers; None for an unquantised checkpoint. Raises StartupError."""
    config = files.config.get("quantization_config") or files.config.get("compression_config")
    if not config:
        return None
    method = config.get("quant_method", "unknown") if isinstance(config, dict) else config
    if not isinstance(config, dict) or method not in METHODS:
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
