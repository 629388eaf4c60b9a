"""Builds an `EngineConfig` from `LLM(...)` keywords or `octavo serve` flags, under vLLM's names.

No argument is silently ignored: an unknown name, a value out of range and a feature that is not implemented each raise
an error that lists the accepted values. An argument of an unimplemented feature is accepted if its value has no effect.
"""

import difflib
import json
from dataclasses import fields
from typing import Any

import msgspec

from octavo_engine.config import EngineConfig, KVEventsConfig
from octavo_engine.wire.errors import StartupError

#: Arguments of vLLM that this version does not implement -> the accepted values, which have no effect.
STILL_TO_COME: dict[str, tuple[Any, ...]] = {
    "api_server_count": (None, 1),
    "async_scheduling": (None, False),
    "compilation_config": (None,),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "uni", "mp"),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "hf_overrides": (None,),
    "kv_cache_dtype": ("auto",),
    "kv_offloading_size": (None,),
    "kv_transfer_config": (None,),
    "limit_mm_per_prompt": (None,),
    "logits_processors": (None,),
    "lora_modules": (None,),
    "mm_processor_kwargs": (None,),
    "pipeline_parallel_size": (1,),
    "pooler_config": (None,),
    "quantization": (None,),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "speculative_config": (None,),
    "structured_outputs_config": (None,),
    "task": (None, "auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (False,),
}

#: Arguments that have no effect with any value: there are no CUDA graphs and no printed statistics.
WITHOUT_EFFECT = frozenset({"disable_custom_all_reduce", "disable_log_stats", "enforce_eager"})

#: Keywords of `LLM.generate` and `LLM.chat` that this version does not implement -> the accepted values.
CALLS_STILL_TO_COME: dict[str, tuple[Any, ...]] = {
    "chat_template_content_format": ("auto", "string"),
    "lora_request": (None,),
    "mm_processor_kwargs": (None,),
    "prompt_adapter_request": (None,),
}

_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}

#: name -> (smallest, largest) accepted value
_RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 1024),
    "gpu_memory_utilization": (0.01, 1.0),
    "kv_cache_memory_bytes": (1, float("inf")),
    "kv_cache_metrics_sample": (1e-6, 1.0),
    "grammar_compile_timeout": (0.001, float("inf")),
    "long_prefill_token_threshold": (0, float("inf")),
    "max_logprobs": (-1, float("inf")),
    "max_model_len": (1, float("inf")),
    "max_num_batched_tokens": (1, float("inf")),
    "max_num_seqs": (1, float("inf")),
    "max_schema_bytes": (2, float("inf")),
    "max_schema_depth": (1, 120),  # the grammar library's JSON parser rejects deeper nesting
    "num_gpu_blocks_override": (1, float("inf")),
    "num_threads": (1, 4096),
    "swap_space": (0, float("inf")),
    "watermark": (0, 0.99),
}


def resolve_config(**arguments: Any) -> EngineConfig:
    """Build the configuration. Raises TypeError for an unknown name, StartupError for an unsupported value."""
    known = {f.name for f in fields(EngineConfig)}
    chosen = {}
    for name, value in arguments.items():
        if name in known:
            chosen[name] = _normalise(name, value)
        elif name in STILL_TO_COME:
            _check_unused(name, value, STILL_TO_COME[name])
        elif name not in WITHOUT_EFFECT:
            raise TypeError(_unknown(name, known))
    try:
        config = msgspec.convert(chosen, EngineConfig)
    except msgspec.ValidationError as error:
        raise StartupError(_invalid(str(error), chosen)) from None
    _check_ranges(config)
    return config


def _normalise(name: str, value: Any) -> Any:
    if name == "dtype":
        word = str(value).removeprefix("torch.")
        return _DTYPE_ALIASES.get(word, word)
    if name == "served_model_name":
        return (value,) if isinstance(value, str) else tuple(value or ())
    if name == "kv_events_config":
        return kv_events_config(value)
    if name in ("model", "tokenizer", "trace", "generation_config", "chat_template") and value is not None:
        return str(value)
    return value


def kv_events_config(value: Any) -> KVEventsConfig | None:
    """Read the configuration from JSON text or a mapping; return None if events are off. Raises StartupError."""
    if value is None or isinstance(value, KVEventsConfig):
        return value
    try:
        given = json.loads(value) if isinstance(value, str) else value
        unknown = sorted(set(given) - {f.name for f in fields(KVEventsConfig)})
        found = msgspec.convert(given, KVEventsConfig)
    except (TypeError, ValueError) as error:
        raise StartupError(f"kv_events_config={value!r} is not a valid configuration: {error}.") from None
    if unknown:
        raise StartupError(f"kv_events_config has no field {unknown[0]!r}.")
    if min(found.buffer_steps, found.hwm) < 0:
        raise StartupError("kv_events_config: buffer_steps and hwm must be at least 0.")
    return found if found.enable_kv_cache_events and found.publisher != "null" else None


def check_call(arguments: dict[str, Any]) -> None:
    """Check extra keywords of an `LLM` method: TypeError for an unknown name, StartupError for an unsupported value."""
    for name, value in arguments.items():
        if name not in CALLS_STILL_TO_COME:
            raise TypeError(f"unexpected keyword argument {name!r}.")
        _check_unused(name, value, CALLS_STILL_TO_COME[name])


def _check_unused(name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if value not in accepted:
        words = " or ".join(repr(choice) for choice in accepted)
        raise StartupError(f"{name}={value!r} is not supported by this version: leave it out, or set it to {words}.")


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known | set(STILL_TO_COME), n=3)
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
