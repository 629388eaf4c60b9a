"""Builds an `EngineConfig` from `LLM(...)` keywords or `octavo serve` flags, under vLLM's names.

No argument is silently ignored: an unknown name, a value out of range and a feature that is not implemented each raise
an error that lists the accepted values. `vllm.py` lists vLLM's other arguments; a start names those without effect.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_args

import msgspec

from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.lora import check_lora, lora_modules
from octavo_engine.settings.pooling import hf_overrides, pooler_config, runner_setting
from octavo_engine.settings.records import MAX_GRAMMAR_BYTES, MAX_GRAPH_ROWS, KVEventsConfig, Quantization
from octavo_engine.settings.speculative import check_speculation, speculative_config
from octavo_engine.settings.vllm import (
    CALL_ARGUMENTS,
    ENGINE_ARGUMENTS,
    OFFLINE_ARGUMENTS,
    UnusedArgument,
    VllmArgument,
    find_unused,
)
from octavo_engine.wire.errors import StartupError

_ARGUMENTS: Mapping[str, VllmArgument] = ENGINE_ARGUMENTS | OFFLINE_ARGUMENTS

_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
#: Further names of `load_format` in vLLM. The last three are faster ways to read the same files.
LOAD_FORMAT_ALIASES = {
    "hf": "auto",
    "runai_streamer": "safetensors",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
}

#: vLLM's name of its own classes of models.
MODEL_IMPL_ALIASES = {"vllm": "octavo"}

#: vLLM's names of checkpoints together with a kernel.
QUANTIZATION_ALIASES = {"gptq_marlin": "gptq", "awq_marlin": "awq"}

#: name -> (smallest, largest) accepted value
_RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 1024),
    "distributed_timeout_seconds": (1, 86400),
    "gpu_memory_utilization": (0.01, 1.0),
    "kv_cache_memory_bytes": (1, float("inf")),
    "kv_cache_metrics_sample": (1e-6, 1.0),
    "grammar_compile_timeout": (0.001, float("inf")),
    "long_prefill_token_threshold": (0, float("inf")),
    "max_logprobs": (-1, float("inf")),
    "max_lora_rank": (1, 1024),
    "max_loras": (1, 1024),
    "max_model_len": (1, float("inf")),
    "max_num_batched_tokens": (1, float("inf")),
    "max_num_seqs": (1, float("inf")),
    "max_step_ms": (0, float("inf")),
    "max_schema_bytes": (2, MAX_GRAMMAR_BYTES),
    "max_schema_depth": (1, 120),  # the grammar library's JSON parser rejects deeper nesting
    "num_gpu_blocks_override": (1, float("inf")),
    "num_threads": (1, 4096),
    "swap_space": (0, float("inf")),
    "tensor_parallel_size": (1, 1024),
    "watermark": (0, 0.99),
}


def resolve_config(**arguments: Any) -> EngineConfig:
    """Build the configuration. Raises TypeError for an unknown name, StartupError for an unsupported value."""
    known = {f.name for f in fields(EngineConfig)}
    chosen = {}
    for name, value in arguments.items():
        if name in known:
            chosen[name] = _CONVERTERS[name](value) if name in _CONVERTERS else value
        elif name not in _ARGUMENTS:
            raise TypeError(_unknown(name, known))
    unused_arguments(arguments)
    chosen |= _json_settings(arguments) | runner_setting(arguments)
    try:
        config = msgspec.convert(chosen, EngineConfig)
    except msgspec.ValidationError as error:
        raise StartupError(_invalid(str(error), chosen)) from None
    _check_ranges(config)
    check_lora(config)
    _check_parallel(config)
    check_speculation(config)
    return config


def _check_parallel(config: EngineConfig) -> None:
    if config.tensor_parallel_size > 1 and config.async_scheduling:
        raise StartupError(
            f"tensor_parallel_size={config.tensor_parallel_size} is not supported with async_scheduling yet: leave one "
            "of them out."
        )


def unused_arguments(arguments: Mapping[str, Any]) -> list[UnusedArgument]:
    """Return the arguments of vLLM that are accepted without effect. Raises StartupError for a refused value."""
    own = EngineConfig.__dataclass_fields__.keys()
    return list(find_unused(_ARGUMENTS, {n: v for n, v in arguments.items() if n in _ARGUMENTS and n not in own}))


def _json_settings(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Fields of `EngineConfig` that vLLM has in `structured_outputs_config`, and once had as arguments of their own."""
    config = arguments.get("structured_outputs_config") or {}
    values = {}
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        for value in (arguments.get(f"guided_decoding_{name}"), config.get(name)):
            if value is not None:
                values[name] = value
    return values


def _dtype(value: Any) -> str:
    word = str(value).removeprefix("torch.")
    return _DTYPE_ALIASES.get(word, word)


def _names(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _quantization(value: Any) -> Any:
    value = QUANTIZATION_ALIASES.get(value, value) if isinstance(value, str) else value
    if value is not None and value not in get_args(Quantization):
        raise StartupError(
            f"quantization={value!r} is not supported by this version: serve a GGUF, GPTQ, AWQ or compressed-tensors "
            "checkpoint, or an unquantised one, with int8 or int4 to quantise it while it loads. Leave it out, or set "
            "it to 'int8', 'int4', 'gptq', 'awq', 'compressed-tensors' or 'gguf'."
        )
    return value


def _capture_sizes(value: Any) -> tuple[int, ...]:
    sizes = [value] if isinstance(value, int) else list(value or ())
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_GRAPH_ROWS:
            raise StartupError(
                f"cudagraph_capture_sizes has the entry {size!r}: give numbers of sequences between 1 and "
                f"{MAX_GRAPH_ROWS}."
            )
    return tuple(sorted(set(sizes)))


def _generation_override(value: Any) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    given = {} if value is None else value
    if not isinstance(given, dict) or not given.keys() <= set(names):
        raise StartupError(
            f"override_generation_config={value!r} is not supported by this version: give a JSON object with fields of "
            f"{', '.join(names)}."
        )
    return given


def kv_events_config(value: Any) -> KVEventsConfig | None:
    """Read the configuration from JSON text or a mapping; return None if events are off. Raises StartupError."""
    if value is None or isinstance(value, KVEventsConfig):
        return value
    try:
        given = json.loads(value) if isinstance(value, str) else value
        unknown = sorted(set(given) - {f.name for f in fields(KVEventsConfig)})
        settings = msgspec.convert(given, KVEventsConfig)
    except (TypeError, ValueError, RecursionError) as error:
        raise StartupError(f"kv_events_config={value!r} is not a valid configuration: {error}.") from None
    if unknown:
        raise StartupError(f"kv_events_config has no field {unknown[0]!r}.")
    if min(settings.buffer_steps, settings.hwm) < 0:
        raise StartupError("kv_events_config: buffer_steps and hwm must be at least 0.")
    return settings if settings.enable_kv_cache_events and settings.publisher != "null" else None


def check_call(arguments: dict[str, Any]) -> None:
    """Check extra keywords of an `LLM` method: TypeError for an unknown name, StartupError for an unsupported value."""
    for name in arguments:
        if name not in CALL_ARGUMENTS:
            raise TypeError(f"unexpected keyword argument {name!r}.")
    list(find_unused(CALL_ARGUMENTS, arguments))


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known | set(_ARGUMENTS), n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{name!r} is not an engine argument.{hint}"


def _invalid(message: str, chosen: dict[str, Any]) -> str:
    """Reword msgspec's message about an argument, which ends with the place of the error: "... - at `$.block_size`"."""
    what, _, where = message.partition(" - at `$.")
    name = where.rstrip("`").partition("[")[0]
    return f"{name}={chosen.get(name)!r}: {what}{_choices(name)}."


def _choices(name: str) -> str:
    declared = next((f.type for f in fields(EngineConfig) if f.name == name), None)
    choices = getattr(declared, "__args__", ())
    return f": use one of {', '.join(choices)}" if choices and all(isinstance(c, str) for c in choices) else ""


def _check_ranges(config: EngineConfig) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            bound = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
            raise StartupError(f"{name} must be {bound}, got {value}.")


#: Functions that convert the values of fields of `EngineConfig` to their types.
_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "tokenizer", "trace", "generation_config", "chat_template", "download_dir"), _text),
    "load_format": lambda value: LOAD_FORMAT_ALIASES.get(value, value),
    "model_impl": lambda value: MODEL_IMPL_ALIASES.get(value, value),
    "dtype": _dtype,
    "quantization": _quantization,
    "max_model_len": lambda value: None if value in ("auto", -1) else value,
    "served_model_name": _names,
    "cudagraph_capture_sizes": _capture_sizes,
    "kv_events_config": kv_events_config,
    "speculative_config": speculative_config,
    "lora_modules": lora_modules,
    "pooler_config": pooler_config,
    "hf_overrides": hf_overrides,
    "override_generation_config": _generation_override,
}
