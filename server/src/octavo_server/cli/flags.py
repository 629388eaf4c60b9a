"""Flags of `octavo serve`, with vLLM's names and defaults. The engine's flags are generated from `EngineConfig`.

A flag of a missing feature is either unknown to the parser or rejected with a reason, never ignored. Flags of features
that are always on are accepted.
"""

import argparse
import json
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo_engine.config import EngineConfig
from octavo_engine.engine_args import STILL_TO_COME

from octavo_server.cli.arg_types import size, size_or_auto
from octavo_server.cli.http_flags import add_address_flags, add_origins_flag
from octavo_server.cli.limit_flags import add_limit_flags
from octavo_server.cli.observe_flags import add_observability_flags
from octavo_server.cli.tool_flags import add_tool_flags

#: Group -> field of EngineConfig -> help.
ENGINE_HELP: dict[str, dict[str, str]] = {
    "model": {
        "tokenizer": "Model or folder of the tokenizer.",
        "revision": "Branch, tag or commit of a model on a hub.",
        "served_model_name": "Names of the model in the API; responses show the first one.",
        "load_format": "Format of the weights; dummy: random weights, without reading files.",
        "dtype": "Type of weights and activations; auto: the fastest type on this machine that the checkpoint allows.",
        "device": "Device of the model.",
        "seed": "Seed of requests without one, so that a restart repeats their answers. Default: random.",
        "generation_config": "Source of default sampling parameters: auto (the model), vllm (none), or a folder.",
        "chat_template": "Jinja chat template, as a file or as text.",
        "num_threads": "Number of CPU threads that run the model.",
    },
    "memory": {
        "max_model_len": "Most tokens of a request, prompt plus output; accepts 32k, 32K, auto.",
        "block_size": "Tokens per KV block.",
        "kv_cache_memory_bytes": "Size of the KV cache in bytes; accepts 4G.",
        "gpu_memory_utilization": "Share of the device's memory to use if no cache size is given.",
        "num_gpu_blocks_override": "Number of KV blocks, instead of a number computed from memory.",
        "swap_space": "CPU memory in GiB for KV blocks that were swapped out.",
        "enable_prefix_caching": "Sharing of KV blocks between requests with equal prefixes.",
        "kv_stream": "Stream of the cached KV blocks for routers, at GET /kv/events.",
        "kv_events_config": "JSON settings of vLLM's ZeroMQ events for other routers; they include prompt tokens.",
    },
    "scheduling": {
        "max_num_seqs": "Most sequences per step.",
        "max_num_batched_tokens": "Most tokens per step.",
        "max_schema_bytes": "Most bytes of a request's JSON schema, regex, grammar or list of choices.",
        "max_schema_depth": "Most nested levels of objects and lists in a JSON schema.",
        "grammar_compile_timeout": "Seconds until a request fails if its grammar is still not compiled.",
        "max_logprobs": "Most log-probabilities per token that a request may ask for; -1: the whole vocabulary.",
        "enable_chunked_prefill": "Computation of long prompts in chunks, in the same steps as running sequences.",
        "long_prefill_token_threshold": "Most tokens of one prompt in a step; 0: no limit.",
        "scheduling_policy": "Order of waiting requests; priority: by their field `priority`, lowest first.",
        "preemption_mode": "Handling of a preempted request's KV blocks; auto: the cheaper of the two.",
        "watermark": "Share of KV blocks that stay free when requests are admitted.",
    },
    "debugging": {
        "kv_cache_metrics": "Metrics about the lifetime of KV blocks.",
        "kv_cache_metrics_sample": "Share of KV blocks that --kv-cache-metrics samples.",
        "trace": "File that records arrivals and decisions for `octavo replay`.",
        "debug_invariants": "Check of the block pool after every step (slow).",
    },
}

_ALIASES = {"dtype": ("half", "float")}
_TYPES: dict[str, Any] = {"max_model_len": size_or_auto, "max_logprobs": int, "seed": int}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", metavar="MODEL", nargs="?", help=f"Model to serve. Default: {EngineConfig().model}."
    )
    parser.add_argument("--model", help="Model to serve, as a flag instead of an argument.")
    hints = get_type_hints(EngineConfig)
    left = {f.name: f for f in fields(EngineConfig) if f.name != "model"}
    for title, helps in ENGINE_HELP.items():
        group = parser.add_argument_group(title)
        for name, text in helps.items():
            _add(group, left.pop(name), hints[name], text)
    for name, config_field in left.items():
        _add(parser, config_field, hints[name], "")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_address_flags(group)
    group.add_argument("--root-path", default="", help="Path prefix that a proxy strips. Default: none.")
    add_origins_flag(group)
    group.add_argument(
        "--response-role", default="assistant", help="Role of messages in chat responses. Default: assistant."
    )
    _switch(group, "--enable-force-include-usage", "Token counts at the end of every stream, requested or not.")
    _switch(group, "--enable-tokenizer-info-endpoint", "The tokenizer's settings and chat template at /tokenizer_info.")
    _switch(group, "--enable-log-requests", "Log line with prompt and parameters for each request.")
    group.add_argument("--max-log-len", type=int, help="Most characters of a prompt in the log. Default: no limit.")
    _switch(group, "--disable-log-stats", "No periodic log line about load and throughput.")
    _switch(group, "--disable-fastapi-docs", "No routes /docs and /openapi.json.")
    add_observability_flags(parser)
    add_limit_flags(parser)
    add_tool_flags(parser)


def add_dry_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Report of the memory that the model needs and of how many requests fit; the model is not loaded.",
    )
    group.add_argument("--json", action="store_true", help="Report of --dry-run as JSON.")


def add_compatibility_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags of features that are always on or still missing; `resolve_config` checks their values."""
    group = parser.add_argument_group("accepted for compatibility")
    for flag in ALWAYS_ON:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help="Always on; both forms have no effect.")
    group.add_argument("--prefix-caching-hash-algo", choices=["sha256"], help="Hash of KV blocks. Default: sha256.")
    group.add_argument(
        "--chat-template-content-format",
        choices=["auto", "string"],
        help="Form of message contents for the chat template. Default: auto.",
    )
    for name in STILL_TO_COME:
        flags = ["--" + name.replace("_", "-"), *_SHORT.get(name, ())]
        group.add_argument(*flags, nargs="?", const=True, type=_json_or_text, help=argparse.SUPPRESS)
        if False in STILL_TO_COME[name]:
            off = "--no-" + name.replace("_", "-")
            group.add_argument(off, dest=name, action="store_const", const=False, help=argparse.SUPPRESS)


ALWAYS_ON = (
    "--disable-log-requests",
    "--enable-prompt-tokens-details",
    "--enable-request-id-headers",
    "--enable-server-load-tracking",
    "--scheduler-reserve-full-isl",
    "--enforce-eager",
)
_SHORT = {"tensor_parallel_size": ("-tp",), "pipeline_parallel_size": ("-pp",), "data_parallel_size": ("-dp",)}


def _add(group: Any, config_field: "Field[Any]", hint: Any, text: str) -> None:
    flag = "--" + config_field.name.replace("_", "-")
    default = None if config_field.default is MISSING else config_field.default
    described = f"{text} Default: {_UNSET.get(config_field.name) or _shown(default)}.".strip()
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=described)
    elif config_field.name == "served_model_name":
        group.add_argument(flag, nargs="+", metavar="NAME", default=[], help=f"{text} Default: MODEL.")
    elif get_origin(hint) is Literal:
        choices = (*get_args(hint), *_ALIASES.get(config_field.name, ()))
        group.add_argument(flag, choices=choices, default=default, help=described)
    else:
        kind = _TYPES.get(config_field.name, _plain_type(hint))
        group.add_argument(flag, type=kind, default=default, metavar=_metavar(kind), help=described)


def _plain_type(hint: Any) -> Any:
    kinds = {kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)}
    return size if int in kinds else float if float in kinds else str


def _metavar(kind: Any) -> str:
    return {int: "N", size: "N", size_or_auto: "N", float: "X"}.get(kind, "TEXT")


#: Text of the default in the help if "none" would be unclear.
_UNSET = {
    "chat_template": "the model's",
    "kv_cache_memory_bytes": "half of the free memory, at most 4 GiB",
    "max_model_len": "the model's limit",
    "num_gpu_blocks_override": "as many as fit",
    "num_threads": "one per core that this process may use",
    "revision": "the hub's default",
    "tokenizer": "the model's",
    "trace": "no recording",
}


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)


def _switch(group: Any, flag: str, text: str) -> None:
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=False, help=f"{text} Default: off.")


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
