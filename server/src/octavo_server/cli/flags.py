"""The flags of `octavo serve`: vLLM's names and defaults. Those of the engine are made from `EngineConfig`'s fields.

A flag of a feature that isn't there yet is either unknown to the parser or refused with a reason, never ignored;
flags that ask for what is always on are accepted.
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
        "tokenizer": "where the tokenizer comes from, if not from the model",
        "revision": "branch, tag or commit of a model on a hub",
        "served_model_name": "names under which the API knows the model; the first one is in the answers",
        "load_format": "format of the weights; dummy: random weights, nothing is read",
        "dtype": "of weights and activations; auto: the fastest on this machine that the checkpoint allows",
        "device": "where to compute",
        "seed": "seed of requests that bring none",
        "generation_config": "defaults of sampling fields: auto (the model's), vllm (none), or a folder",
        "chat_template": "file with a Jinja chat template, or the template itself",
        "num_threads": "CPU threads for computing",
    },
    "memory": {
        "max_model_len": "longest request, prompt and output, in tokens; accepts 32k, 32K, auto",
        "block_size": "tokens per KV block",
        "kv_cache_memory_bytes": "size of the KV cache; accepts 4G",
        "gpu_memory_utilization": "share of the device's memory to use, when no size is given",
        "num_gpu_blocks_override": "number of KV blocks, instead of measuring memory",
        "swap_space": "GiB of CPU memory for KV blocks that were swapped out",
        "enable_prefix_caching": "share the KV of equal prefixes",
        "kv_stream": "tell routers which blocks are cached: GET /kv/events",
        "kv_events_config": "JSON: tell others' routers, too, by vLLM's ZeroMQ events, tokens of prompts included",
    },
    "scheduling": {
        "max_num_seqs": "sequences per step",
        "max_num_batched_tokens": "tokens per step",
        "max_schema_bytes": "longest JSON schema, regex, grammar or list of choices that a request may bring",
        "max_schema_depth": "deepest nesting of objects and lists in a JSON schema",
        "grammar_compile_timeout": "seconds until a request fails whose grammar isn't compiled",
        "max_logprobs": "most log-probabilities that a request may ask for; -1: the whole vocabulary",
        "enable_chunked_prefill": "compute long prompts in pieces, beside running sequences",
        "long_prefill_token_threshold": "most tokens of one prompt in a step; 0: no limit",
        "scheduling_policy": "order of waiting requests; priority: by the field of that name, lowest first",
        "preemption_mode": "what becomes of the KV of a preempted request; auto: what costs less",
        "watermark": "share of KV blocks kept free when requests are admitted",
    },
    "debugging": {
        "kv_cache_metrics": "metrics about the lives of KV blocks",
        "kv_cache_metrics_sample": "share of KV blocks that these metrics follow",
        "trace": "file to record arrivals and decisions in, for `octavo replay`",
        "debug_invariants": "check the block pool after every step (slow)",
    },
}

_ALIASES = {"dtype": ("half", "float")}
_TYPES: dict[str, Any] = {"max_model_len": size_or_auto, "max_logprobs": int, "seed": int}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", metavar="MODEL", nargs="?", help=f"what to serve (default: {EngineConfig().model})"
    )
    parser.add_argument("--model", help="MODEL, as a flag")
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
    group.add_argument("--root-path", default="", help="path prefix that a proxy strips (default: none)")
    add_origins_flag(group)
    group.add_argument("--response-role", default="assistant", help="role of chat answers (default: assistant)")
    _switch(group, "--enable-force-include-usage", "usage in every stream, asked for or not")
    _switch(group, "--enable-log-requests", "log prompts and parameters")
    group.add_argument("--max-log-len", type=int, help="most characters of a prompt in the log (default: all)")
    _switch(group, "--disable-log-stats", "no periodic line about load and throughput")
    _switch(group, "--disable-fastapi-docs", "no /docs and no /openapi.json")
    add_observability_flags(parser)
    add_limit_flags(parser)
    add_tool_flags(parser)


def add_dry_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run", action="store_true", help="say what the model takes and how many requests fit, and load nothing"
    )
    group.add_argument("--json", action="store_true", help="the answer of --dry-run as JSON")


def add_compatibility_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for what is always on, and those of features still to come: `resolve_config` says what they may be."""
    group = parser.add_argument_group("accepted because scripts pass them")
    for flag in ALWAYS_ON:
        group.add_argument(
            flag, action=argparse.BooleanOptionalAction, help="always on: the --no- form changes nothing"
        )
    group.add_argument("--prefix-caching-hash-algo", choices=["sha256"], help="(default: sha256)")
    group.add_argument("--chat-template-content-format", choices=["auto", "string"], help="(default: auto)")
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
    described = f"{text} (default: {_UNSET.get(config_field.name) or _shown(default)})".strip()
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=described)
    elif config_field.name == "served_model_name":
        group.add_argument(flag, nargs="+", metavar="NAME", default=[], help=f"{text} (default: MODEL)")
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


#: What happens without a value, where "none" would not say it.
_UNSET = {
    "chat_template": "the model's",
    "kv_cache_memory_bytes": "half of what is free, at most 4 GiB",
    "max_model_len": "the model's own",
    "num_gpu_blocks_override": "as many as fit",
    "num_threads": "one per core that this process may use",
    "revision": "the hub's default",
    "tokenizer": "the model's",
    "trace": "nothing is recorded",
}


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)


def _switch(group: Any, flag: str, text: str) -> None:
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=False, help=f"{text} (default: off)")


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
