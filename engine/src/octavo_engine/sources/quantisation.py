"""`read_quantisation`: how a checkpoint's layers are packed, or a refusal that names its method."""

from collections.abc import Callable

from octavo_engine.sources.compressed_config import read_compressed_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.packed_config import (
    PackedConfig,
    QuantizationSettings,
    read_awq_config,
    read_gptq_config,
)
from octavo_engine.wire.errors import StartupError

METHODS: dict[str, Callable[[QuantizationSettings], PackedConfig]] = {
    "gptq": read_gptq_config,
    "awq": read_awq_config,
    "compressed-tensors": read_compressed_config,
}


def read_quantisation(files: ModelFiles) -> PackedConfig | None:
    """Return the settings of packed layers; None for an unquantised checkpoint. Raises StartupError."""
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
