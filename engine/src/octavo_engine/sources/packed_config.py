"""Reads how a GPTQ or AWQ checkpoint was quantised: from `quantization_config` in config.json."""

from dataclasses import dataclass
from typing import Any

from octavo_engine.wire.errors import StartupError

GPTQ_BITS = (4, 8)
AWQ_BITS = (4,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedConfig:
    """`method`: as in vLLM. `group_size`: inputs that share a scale; None: all of a layer.

    `symmetric`: all zero points are 2^(bits - 1). `zero_offset`: 1 in the first version of GPTQ's format, which stores
    zero points less one. `ignored`: parts of the names of layers that are not quantised.
    """

    method: str
    bits: int
    group_size: int | None
    symmetric: bool
    zero_offset: int = 0
    ignored: tuple[str, ...] = ()


class _Settings:
    """`quantization_config` of a model `name`, the values of which are checked when they are read."""

    def __init__(self, name: str, method: str, config: dict[str, Any]) -> None:
        self.name, self.method, self.config = name, method, config

    def get(self, *keys: str, default: Any = None) -> Any:
        return next((self.config[key] for key in keys if key in self.config), default)

    def refuse(self, what: str, remedy: str) -> StartupError:
        return StartupError(f"{self.name}: {self.method} checkpoint: {what}: {remedy}.")

    def bits(self, accepted: tuple[int, ...]) -> int:
        bits = self.get("bits", "w_bit")
        if type(bits) is not int or bits not in accepted:
            remedy = f"use a checkpoint of {' or '.join(map(str, accepted))} bits"
            raise self.refuse(f"bits={bits!r} is not supported", remedy)
        return bits

    def group_size(self) -> int | None:
        size = self.get("group_size", "q_group_size", default=-1)
        if type(size) is not int or size < -1 or size == 0:
            raise self.refuse(f"group_size={size!r} is invalid", "it must be a positive number, or -1 for one group")
        return None if size == -1 else size


def read_packed_config(name: str, config: dict[str, Any], model_type: str) -> PackedConfig | None:
    """Check the settings; return None for another method. Raises StartupError with value and remedy."""
    method = config.get("quant_method")
    if method not in ("gptq", "awq"):
        return None
    settings = _Settings(name, method.upper(), config)
    if model_type == "gpt2":
        remedy = "use an unquantised or a GGUF checkpoint"
        raise settings.refuse("the architecture GPT-2 stores its weights transposed", remedy)
    return _read_gptq(settings) if method == "gptq" else _read_awq(settings)


def _read_gptq(settings: _Settings) -> PackedConfig:
    version = settings.get("checkpoint_format") or ("marlin" if settings.get("is_marlin_format") else "gptq")
    if version not in ("gptq", "gptq_v2"):
        remedy = "use one in the format gptq or gptq_v2"
        raise settings.refuse(f"checkpoint_format={version!r} is not supported", remedy)
    if changes := [pattern for pattern in settings.get("dynamic") or {} if not pattern.startswith("-:")]:
        remedy = "use a checkpoint whose layers have equal settings"
        raise settings.refuse(f"dynamic={changes[0]!r} is not supported", remedy)
    return PackedConfig(
        method="gptq",
        bits=settings.bits(GPTQ_BITS),
        group_size=settings.group_size(),
        symmetric=bool(settings.get("sym", default=True)),
        zero_offset=int(version == "gptq"),
    )


def _read_awq(settings: _Settings) -> PackedConfig:
    version = str(settings.get("version", default="gemm")).lower()
    if version != "gemm":
        raise settings.refuse(f"version={version!r} is not supported", "use a checkpoint of the version gemm")
    ignored = settings.get("modules_to_not_convert") or ()
    if not isinstance(ignored, list | tuple) or not all(isinstance(part, str) for part in ignored):
        raise settings.refuse(f"modules_to_not_convert={ignored!r} is invalid", "it must be a list of names")
    return PackedConfig(
        method="awq",
        bits=settings.bits(AWQ_BITS),
        group_size=settings.group_size(),
        symmetric=not settings.get("zero_point", default=True),
        ignored=tuple(ignored),
    )
