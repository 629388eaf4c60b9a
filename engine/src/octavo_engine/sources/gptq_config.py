"""Reads how a GPTQ checkpoint was quantised: `quantization_config` in config.json, or a quantize_config.json."""

from dataclasses import dataclass
from typing import Any

from octavo_engine.wire.errors import StartupError

BITS = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQConfig:
    """`group_size`: inputs that share a scale; None: all of a layer. `symmetric`: all zero points are 2^(bits - 1).

    `zero_offset`: 1 in the format's first version, which stores zero points less one. `method`: as in vLLM.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    zero_offset: int
    method: str = "gptq"


def read_gptq_config(name: str, config: dict[str, Any], model_type: str) -> GPTQConfig:
    """Check the settings. `name`: the model, for errors. Raises StartupError with value and remedy."""

    def refuse(what: str, remedy: str) -> StartupError:
        return StartupError(f"{name}: GPTQ checkpoint: {what}: {remedy}.")

    bits, group_size = config.get("bits"), config.get("group_size", -1)
    checkpoint_format = config.get("checkpoint_format") or ("marlin" if config.get("is_marlin_format") else "gptq")
    if bits not in BITS or isinstance(bits, bool):
        raise refuse(f"bits={bits!r} is not supported", "use a checkpoint of 4 or 8 bits")
    if not isinstance(group_size, int) or group_size < -1 or group_size == 0:
        raise refuse(f"group_size={group_size!r} is invalid", "it must be a positive number, or -1 for one group")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise refuse(
            f"checkpoint_format={checkpoint_format!r} is not supported", "use one in the format gptq or gptq_v2"
        )
    if changes := [pattern for pattern in config.get("dynamic") or {} if not pattern.startswith("-:")]:
        raise refuse(f"dynamic={changes[0]!r} is not supported", "use a checkpoint whose layers have equal settings")
    if model_type == "gpt2":
        raise refuse("the architecture GPT-2 stores its weights transposed", "use an unquantised or a GGUF checkpoint")
    return GPTQConfig(
        bits=bits,
        group_size=None if group_size == -1 else group_size,
        symmetric=bool(config.get("sym", True)),
        zero_offset=int(checkpoint_format == "gptq"),
    )
