"""vLLM's engine arguments and environment variables for which Octavo has no setting; `engine_args` and CLI read them.

A value of an argument is *fulfilled* (Octavo always behaves so), *harmless* (accepted without effect, as no output
depends on it; a log line at the start names it), or refused with a reason and a remedy. Nothing is ignored silently. To
implement an argument, add a field to `EngineConfig` and delete the argument's row here.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from octavo_engine.wire.errors import StartupError

LOGGING_LEVEL = "VLLM_LOGGING_LEVEL"
#: Values of `convert` and `task` for an embedding model.
EMBED = ("embed", "embedding")
#: Variables that the engine reads.
ENGINE_VARIABLES = frozenset(
    {
        *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_HOST_IP", "VLLM_PP_LAYER_PARTITION"),
        *("VLLM_USE_MODELSCOPE", LOGGING_LEVEL),
    }
)
#: Kubernetes' variables for a Service whose name begins with "vllm".
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")
_ADDRESS = ("tcp://", "udp://")


class _AnyValue:
    def __contains__(self, value: object) -> bool:
        return True


ANY: Container[Any] = _AnyValue()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmArgument:
    """`missing`, `remedy`: sentences of the error for a refused value. `note`: text in parentheses in the log line.

    `is_switch`, `is_list`: form of the flag. `flags`: further names of it. `fields`: the fields of a JSON argument.
    """

    fulfilled: Container[Any] = ()
    harmless: Container[Any] = ()
    missing: str = "it is not built."
    remedy: str = ""
    note: str = ""
    is_switch: bool = False
    is_list: bool = False
    is_deprecated: bool = False
    flags: tuple[str, ...] = ()
    fields: Mapping[str, "VllmArgument"] = field(default_factory=dict)


class UnusedArgument(NamedTuple):
    """An argument that was accepted without effect."""

    name: str
    value: Any
    argument: VllmArgument


def find_unused(table: Mapping[str, VllmArgument], given: Mapping[str, Any]) -> Iterator[UnusedArgument]:
    """Check arguments of the table; yield those without effect. None is "not given". Raises StartupError."""
    for name, value in given.items():
        argument = table[name]
        if value is None or _contains(argument.fulfilled, value):
            continue
        if argument.fields and isinstance(value, Mapping):
            yield from _find_unused_fields(name, argument, value)
        elif _contains(argument.harmless, value):
            yield UnusedArgument(name, value, argument)
        else:
            raise StartupError(_refusal(name, value, argument))


def describe_unused(unused: Iterable[UnusedArgument], *, as_flags: bool) -> list[str]:
    """Return lines for the start's log: one on arguments without effect, one on arguments that vLLM deprecated."""
    arguments = list(unused)
    kinds = (
        ("accepted without effect here", [u for u in arguments if not u.argument.is_deprecated]),
        ("deprecated by vLLM and without effect here, leave out", [u for u in arguments if u.argument.is_deprecated]),
    )
    spell = _as_flag if as_flags else _as_keyword
    return [f"{title}: {', '.join(map(spell, entries))}" for title, entries in kinds if entries]


def _find_unused_fields(name: str, argument: VllmArgument, value: Mapping[str, Any]) -> Iterator[UnusedArgument]:
    if unknown := sorted(value.keys() - argument.fields.keys()):
        fields = ", ".join(argument.fields)
        raise StartupError(f"{name} has no field {unknown[0]!r}: leave it out, or use one of {fields}.")
    table = {f"{name}.{key}": argument.fields[key] for key in value}
    yield from find_unused(table, {f"{name}.{key}": entry for key, entry in value.items()})


def _contains(values: Container[Any], value: Any) -> bool:
    """Return whether `values` has the value with its type; in Python, True equals 1, but here it must not."""
    if isinstance(values, tuple):
        return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values)
    return value in values


def _refusal(name: str, value: Any, argument: VllmArgument) -> str:
    accepted = argument.fulfilled, argument.harmless
    choices = [repr(choice) for values in accepted if isinstance(values, tuple) for choice in values]
    rule = f"Leave it out, or set it to {' or '.join(choices)}" if choices else "Leave it out"
    remedy = f"; {argument.remedy}" if argument.remedy else "."
    return f"{name}={value!r} is not supported by this version: {argument.missing} {rule}{remedy}"


def _as_flag(unused: UnusedArgument) -> str:
    head, dot, rest = unused.name.partition(".")
    prefix = "--no-" if unused.value is False and not dot else "--"
    return prefix + head.replace("_", "-") + dot + rest + _note(unused)


def _as_keyword(unused: UnusedArgument) -> str:
    return f"{unused.name}={unused.value!r}{_note(unused)}"


def _note(unused: UnusedArgument) -> str:
    return f" ({unused.argument.note})" if unused.argument.note else ""


SETTING = VllmArgument(harmless=ANY)
SWITCH = VllmArgument(harmless=ANY, is_switch=True)
OLD_SETTING = replace(SETTING, is_deprecated=True)
OLD_SWITCH = replace(SWITCH, is_deprecated=True)
ALWAYS_ON = VllmArgument(fulfilled=(True,), harmless=(False,), is_switch=True, note="it is always on")


def _values(*fulfilled: Any, missing: str, remedy: str = "", **more: Any) -> VllmArgument:
    return VllmArgument(fulfilled=fulfilled, missing=missing, remedy=remedy, **more)


_ONE_DEVICE: dict[str, Any] = {
    "missing": "an engine divides a model only by --tensor-parallel-size and --pipeline-parallel-size.",
    "remedy": "octavo up --replicas N runs several engines behind a router.",
}
_NO_PROMPT_ADAPTERS: dict[str, Any] = {"missing": "prompt adapters are not served.", "remedy": "see --enable-lora."}
_NO_POOLING: dict[str, Any] = {
    "missing": "models generate text or make embeddings; there are no classifiers or rewards."
}
_NO_MEDIA: dict[str, Any] = {"missing": "images are read as the model's files say, and no audio or video."}
_SHARED_STEPS = "prompts share each step, see --max-step-ms"
_NO_PLUGIN: dict[str, Any] = {"missing": "the engine runs no code of others."}
_CONFIG_JSON: dict[str, Any] = {"missing": "the model's config.json decides.", "remedy": "see --hf-overrides."}
_ROPE = _CONFIG_JSON | {"remedy": """--hf-overrides '{"rope_scaling": {...}, "rope_theta": ...}' replaces it."""}
_NO_TRANSFER: dict[str, Any] = {"missing": "KV blocks are neither sent to other engines nor stored outside this one."}
_GRAMMAR: dict[str, Any] = {"missing": "outputs follow the grammar as it is sent."}

#: Bounds of speed and memory, and choices between kernels: no output depends on them.
_TUNING = (
    *("all2all_backend", "api_server_count", "attention_backend", "attention_config", "compilation_config"),
    *("max_cudagraph_capture_size", "optimization_level", "performance_mode"),
    *("kernel_config", "moe_backend", "linear_backend", "eplb_config", "expert_placement_strategy"),
    *("dbo_decode_token_threshold", "dbo_prefill_token_threshold", "kv_offloading_backend"),
    *("mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_ssm_cache_dtype"),
    *("max_num_partial_prefills", "max_long_partial_prefills", "max_parallel_loading_workers"),
    *("model_loader_extra_config", "pt_load_map_location", "safetensors_load_strategy", "ignore_patterns"),
    *("lora_dtype", "lora_extra_vocab_size"),
    *("allowed_local_media_path", "allowed_media_domains", "media_io_kwargs", "mm_encoder_attn_backend"),
    *("mm_encoder_tp_mode", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
    *("video_pruning_rate", "collect_detailed_traces", "additional_config"),
    *("data_parallel_address", "data_parallel_backend", "data_parallel_rpc_port"),
    "cpu_distributed_timeout_seconds",
)
_TUNING_SWITCHES = (
    *("aggregate_engine_logging", "cudagraph_metrics", "data_parallel_external_lb"),
    *("data_parallel_hybrid_lb", "disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce"),
    *("disable_hybrid_kv_cache_manager", "disable_nccl_for_dp_synchronization", "enable_dbo", "enable_eplb"),
    *("enable_expert_parallel", "enable_flashinfer_autotune", "enable_layerwise_nvtx_tracing", "enable_mfu_metrics"),
    *("enable_logging_iteration_details", "fully_sharded_loras", "interleave_mm_strings", "kv_sharing_fast_prefill"),
    *("ray_workers_use_nsight", "skip_mm_profiling", "use_tqdm_on_load"),
)
#: Arguments that vLLM itself has removed or is about to remove.
_OLD = (
    *("cuda_graph_sizes", "max_context_len_to_capture", "max_seq_len_to_capture", "num_lookahead_slots"),
    *("num_scheduler_steps", "scheduler_delay_factor", "tokenizer_pool_size", "tokenizer_pool_type"),
    *("tokenizer_pool_extra_config", "eplb_window_size", "eplb_step_interval", "num_redundant_experts"),
)
_OLD_SWITCHES = (
    *("disable_async_output_proc", "disable_mm_preprocessor_cache", "engine_use_ray"),
    *("eplb_log_balancedness", "multi_step_stream_outputs", "use_v2_block_manager", "worker_use_ray"),
    *("enable_multimodal_encoder_data_parallel", "guided_decoding_disable_fallback"),
)

_BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
_BACKEND = VllmArgument(
    fulfilled=("auto",),
    harmless=_BACKENDS,
    missing="it is unknown.",
    note="there is one grammar library, and outputs follow the same grammars",
)
_OFF = VllmArgument(fulfilled=(False,), **_GRAMMAR)
#: vLLM's other name for a setting of `EngineConfig`.
_EITHER = VllmArgument(fulfilled=(False, True), missing="it is true or false.")

ENGINE_ARGUMENTS: dict[str, VllmArgument] = {
    **dict.fromkeys(_TUNING, SETTING),
    **dict.fromkeys(_TUNING_SWITCHES, SWITCH),
    **dict.fromkeys(_OLD, OLD_SETTING),
    **dict.fromkeys(_OLD_SWITCHES, OLD_SWITCH),
    "api_server_count": replace(SETTING, fulfilled=(1,), flags=("-asc",)),
    "attention_config": replace(SETTING, flags=("-ac",)),
    "compilation_config": replace(SETTING, flags=("-cc",)),
    "optimization_level": replace(SETTING, flags=("-O",)),
    "cuda_graph_sizes": replace(OLD_SETTING, is_list=True),
    "ignore_patterns": replace(SETTING, is_list=True),
    "allowed_media_domains": replace(SETTING, is_list=True),
    "disable_custom_all_reduce": replace(SWITCH, fulfilled=(True,)),
    "max_num_partial_prefills": replace(SETTING, fulfilled=(1,), note=_SHARED_STEPS),
    "max_long_partial_prefills": replace(SETTING, fulfilled=(1,), note=_SHARED_STEPS),
    "show_hidden_metrics_for_version": replace(SETTING, note="old names are always exposed"),
    # Always so, or never.
    "scheduler_reserve_full_isl": ALWAYS_ON,
    "trust_remote_code": replace(SWITCH, fulfilled=(False,), note="no code from checkpoints is ever run"),
    "code_revision": replace(SETTING, note="no code from checkpoints is ever run"),
    "enable_reasoning": replace(OLD_SWITCH, note="--reasoning-parser alone separates the reasoning"),
    # Several devices.
    "data_parallel_size": _values(1, flags=("-dp",), **_ONE_DEVICE),
    "data_parallel_size_local": _values(1, flags=("-dpl",), **_ONE_DEVICE),
    "data_parallel_rank": _values(0, flags=("-dpn",), **_ONE_DEVICE),
    "data_parallel_start_rank": _values(0, flags=("-dpr",), **_ONE_DEVICE),
    "decode_context_parallel_size": _values(1, flags=("-dcp",), **_ONE_DEVICE),
    "prefill_context_parallel_size": _values(1, flags=("-pcp",), **_ONE_DEVICE),
    "distributed_executor_backend": _values("uni", "mp", **_ONE_DEVICE),
    "data_parallel_address": replace(SETTING, flags=("-dpa",)),
    "data_parallel_rpc_port": replace(SETTING, flags=("-dpp",)),
    "data_parallel_backend": replace(SETTING, flags=("-dpb",)),
    # Types and formats.
    "calculate_kv_scales": VllmArgument(
        fulfilled=(False,), is_switch=True, missing="an FP8 cache has the scales of the checkpoint, or 1."
    ),
    "override_attention_dtype": VllmArgument(missing="attention has the type of the model.", remedy="see --dtype."),
    "config_format": _values("auto", "hf", missing="only config.json of Hugging Face is read."),
    "tokenizer_mode": _values(
        *("auto", "hf"),
        harmless=("slow",),
        note="the fast tokenizer gives the same tokens",
        missing="only tokenizer.json of Hugging Face and the tokenizer in a GGUF are read.",
    ),
    "tokenizer_revision": VllmArgument(
        missing="the tokenizer has the revision of the model.", remedy="download it and give --tokenizer its folder."
    ),
    "skip_tokenizer_init": replace(
        SWITCH, fulfilled=(False,), note="the tokenizer is loaded, and outputs have text"
    ),
    "hf_config_path": VllmArgument(**_CONFIG_JSON),
    "rope_scaling": _values({}, **_ROPE),
    "rope_theta": VllmArgument(**_ROPE),
    "disable_sliding_window": _values(False, is_switch=True, **_CONFIG_JSON),
    "prefix_caching_hash_algo": _values(
        "sha256",
        harmless=("builtin", "sha256_cbor", "xxhash", "xxhash_cbor"),
        note="the hash is sha256",
        missing="it is unknown.",
    ),
    # Structured outputs and sampling.
    "structured_outputs_config": _values(
        {},
        fields={
            "backend": _BACKEND,
            "disable_fallback": SETTING,
            "disable_any_whitespace": _EITHER,
            "disable_additional_properties": _EITHER,
            "enable_in_reasoning": _OFF,
            "reasoning_parser": _values("", missing="it is a flag.", remedy="see --reasoning-parser."),
            "reasoning_parser_plugin": _values("", **_NO_PLUGIN),
        },
        missing="it is no JSON object.",
    ),
    "guided_decoding_backend": replace(_BACKEND, is_deprecated=True),
    "guided_decoding_disable_any_whitespace": replace(_EITHER, is_switch=True),
    "guided_decoding_disable_additional_properties": replace(_EITHER, is_switch=True),
    "reasoning_config": _values({}, missing="--reasoning-parser knows the tokens around reasoning."),
    # Features.
    "enable_prompt_adapter": _values(False, is_switch=True, **_NO_PROMPT_ADAPTERS),
    "convert": _values("auto", "none", *EMBED, **_NO_POOLING),
    "task": _values("auto", "generate", *EMBED, **_NO_POOLING),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), VllmArgument(fulfilled=ANY)),
    "override_pooler_config": VllmArgument(missing="it was renamed.", remedy="see --pooler-config."),
    "language_model_only": _values(
        False,
        is_switch=True,
        missing="a model that takes images takes them.",
        remedy="""--limit-mm-per-prompt '{"image": 0}' refuses them.""",
    ),
    "default_mm_loras": _values({}, **_NO_MEDIA),
    "enable_mm_embeds": _values(False, is_switch=True, **_NO_MEDIA),
    "enable_prompt_embeds": _values(False, is_switch=True, missing="prompts are text or token ids."),
    "cpu_offload_gb": _values(0, missing="weights stay on the model's device."),
    "kv_offloading_size": _values(0, **{**_NO_TRANSFER, "remedy": "see --swap-space for preempted requests."}),
    "kv_transfer_config": VllmArgument(**_NO_TRANSFER),
    "ec_transfer_config": VllmArgument(**_NO_TRANSFER),
    "logits_processors": VllmArgument(is_list=True, **_NO_PLUGIN),
    "logits_processor_pattern": VllmArgument(**_NO_PLUGIN),
    "io_processor_plugin": VllmArgument(**_NO_PLUGIN),
    "reasoning_parser_plugin": _values("", **_NO_PLUGIN),
    "scheduler_cls": VllmArgument(**_NO_PLUGIN),
    "worker_cls": _values("auto", **_NO_PLUGIN),
    "worker_extension_cls": _values("", **_NO_PLUGIN),
}  # fmt: skip

#: Arguments of vLLM's `LLM` that are flags of `octavo serve`, and have no effect on a script.
OFFLINE_ARGUMENTS: dict[str, VllmArgument] = {"disable_log_stats": SWITCH, "stream_interval": SETTING}

#: Keywords of `LLM.generate` and `LLM.chat` that are not implemented.
CALL_ARGUMENTS: dict[str, VllmArgument] = {
    "mm_processor_kwargs": VllmArgument(
        missing="it is a key of a prompt, or a keyword of chat.",
        remedy='generate({"prompt": ..., "mm_processor_kwargs": ...})',
    ),
    "prompt_adapter_request": VllmArgument(**_NO_PROMPT_ADAPTERS),
}


def unused_variables(environ: Mapping[str, str], honoured: Iterable[str] = ENGINE_VARIABLES) -> list[str]:
    """Log lines about variables of vLLM without effect: one line, or none."""
    names = sorted(name for name in environ if name.startswith("VLLM_") and not _is_service_link(name, environ[name]))
    unused = [name for name in names if name not in set(honoured)]
    return [f"set without effect here: {', '.join(unused)}"] if unused else []


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name)) or value.startswith(_ADDRESS)
