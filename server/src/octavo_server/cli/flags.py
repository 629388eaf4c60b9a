"""Flags of `octavo serve` for the engine, generated from `EngineConfig`, with vLLM's names and defaults.

`vllm_flags` adds vLLM's other flags.
"""

import argparse
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo_engine.settings.arg_types import json_object, size, size_or_auto
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.engine_args import LOAD_FORMAT_ALIASES, MODEL_IMPL_ALIASES

#: Group -> field of EngineConfig -> help.
ENGINE_HELP: dict[str, dict[str, str]] = {
    "model": {
        "tokenizer": "Model or folder that contains the tokenizer.",
        "revision": "Branch, tag or commit of a model on the Hugging Face hub.",
        "download_dir": "Folder for downloaded models.",
        "served_model_name": "Names of the model in the API; responses show the first one.",
        "model_impl": "Implementation of the model; auto: a class of Octavo if there is one, else transformers; vllm: "
        "octavo.",
        "runner": "Purpose of the model; auto: pooling (embeddings) for an embedding model, else generate.",
        "pooler_config": "JSON settings of an embedding model, instead of its files': pooling_type (LAST, CLS or "
        "MEAN) and use_activation (vectors of length 1).",
        "hf_overrides": "JSON object of keys that the model's config.json lacks: is_matryoshka or "
        "matryoshka_dimensions, which allow shorter vectors.",
        "load_format": "File format of the weights; dummy: random weights, without reading files.",
        "dtype": "Type of weights and activations; auto: of the types that suit the checkpoint, the fastest on this "
        "machine.",
        "quantization": "Type to which the weights of linear layers are quantised while they load, on a CPU: int8 or "
        "int4; gptq, awq, compressed-tensors, gguf: only such checkpoints are accepted, whose weights keep their bits.",
        "device": "Device that runs the model.",
        "seed": "Seed of requests without one, so that a restart repeats their answers. Default: random.",
        "generation_config": "Source of the default sampling parameters; auto: the model's generation_config.json; "
        "vllm: vLLM's defaults; otherwise a folder with a generation_config.json.",
        "override_generation_config": "JSON object of default sampling parameters, which replace those of the source.",
        "chat_template": "Jinja chat template, as a file, as text, or as the name of one of the model's.",
        "chat_template_content_format": "Content of messages for the template; string: text; openai: a list of parts; "
        "auto: for each role, what the template renders.",
        "num_threads": "Number of CPU threads that run the model.",
        "tensor_parallel_size": "Number of processes (ranks) that divide each layer of the model among them.",
        "distributed_timeout_seconds": "Seconds after which a rank that does not answer during a step ends the engine.",
        "enforce_eager": "Decode steps that always run the model's Python code, instead of a recording or CUDA graph.",
        "cudagraph_capture_sizes": "Numbers of sequences for which decode steps on a GPU are captured as CUDA graphs.",
    },
    "memory": {
        "max_model_len": "Largest number of tokens of a request, prompt plus output; accepts 32k, 32K; auto or -1: the "
        "model's limit, or as many as the memory of the machine or container allows.",
        "block_size": "Tokens per KV block.",
        "kv_cache_memory_bytes": "Size of the KV cache in bytes; accepts 4G.",
        "gpu_memory_utilization": "Share of the memory of the machine or container for weights and KV cache together.",
        "num_gpu_blocks_override": "Number of KV blocks, which otherwise follows from the size of the KV cache.",
        "swap_space": "CPU memory in GiB for the KV blocks of preempted requests.",
        "enable_sleep_mode": "Routes /sleep and /wake_up, which release and restore the memory of the KV cache and the "
        "weights.",
        "enable_prefix_caching": "Sharing of KV blocks between requests with equal prefixes.",
        "kv_stream": "Route GET /kv/events, which streams the hashes of the cached KV blocks to Octavo's routers.",
        "kv_events_config": "JSON settings of vLLM's KV events over ZeroMQ, for other routers; the events contain "
        "prompt tokens.",
    },
    "scheduling": {
        "max_num_seqs": "Largest number of sequences per step.",
        "max_num_batched_tokens": "Largest number of tokens per step.",
        "disable_any_whitespace": "JSON of structured outputs without whitespace between its tokens.",
        "disable_additional_properties": "No properties in structured outputs besides those of the schema.",
        "max_schema_bytes": "Largest size, in bytes, of a request's JSON schema, regex, grammar or list of choices.",
        "max_schema_depth": "Largest number of nested levels in a request's JSON schema.",
        "grammar_compile_timeout": "Seconds after which a request fails if its grammar is still being compiled.",
        "max_logprobs": "Largest number of log-probabilities per token that a request may ask for; -1: no limit.",
        "logprobs_mode": "Values reported as log-probabilities: before or after the sampling parameters are applied.",
        "enable_chunked_prefill": "Computation of long prompts in chunks, in the same steps as running sequences.",
        "long_prefill_token_threshold": "Largest number of tokens of one prompt that a step computes; 0: no limit.",
        "async_scheduling": "Decode steps that start before the tokens of the one before are known to the host.",
        "max_step_ms": "Milliseconds that a step may take if it computes a prompt beside other requests; 0: no limit.",
        "scheduling_policy": "Order of waiting requests; fcfs: by arrival; priority: lowest field `priority` first.",
        "preemption_mode": "Treatment of a preempted request: its KV blocks are swapped to CPU memory, or recomputed "
        "later; auto: the cheaper of the two.",
        "watermark": "Share of the KV blocks that admitting a new request must leave free.",
    },
    "adapters": {
        "enable_lora": "LoRA adapters beside the model: requests choose one by its name.",
        "lora_modules": "Adapters to load, as name=folder or JSON with name and path. Each folder is one that peft has "
        "saved; it may be on a hub or in a bucket.",
        "max_loras": "Largest number of adapters in memory, for which room is reserved.",
        "max_lora_rank": "Largest rank of an adapter.",
    },
    "speculation": {
        "speculative_config": "JSON settings of speculative decoding: num_speculative_tokens and the model that makes "
        "drafts; or, for outputs that repeat their prompt, method (ngram), prompt_lookup_max and prompt_lookup_min.",
    },
    "debugging": {
        "kv_cache_metrics": "Metrics of the time that KV blocks live, idle and wait for reuse.",
        "kv_cache_metrics_sample": "Share of the KV blocks that --kv-cache-metrics observes.",
        "trace": "File to which the scheduler's inputs and decisions are written, for `octavo replay`.",
        "debug_invariants": "Consistency check of all KV blocks after every step (slow).",
    },
}

_ALIASES = {
    "dtype": ("half", "float"),
    "load_format": tuple(LOAD_FORMAT_ALIASES),
    "model_impl": tuple(MODEL_IMPL_ALIASES),
}
_SHORT_FLAGS = {"quantization": ("-q",), "speculative_config": ("-sc",), "tensor_parallel_size": ("-tp",)}
_TYPES: dict[str, Any] = {
    "max_model_len": size_or_auto,
    "max_logprobs": int,
    "seed": int,
    "override_generation_config": json_object,
    "hf_overrides": json_object,
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", metavar="MODEL", nargs="?", help=f"Model to serve. Default: {EngineConfig().model}."
    )
    parser.add_argument("--model", help="Model to serve, if the argument MODEL is not given.")
    parser.add_argument(
        *("--hf-token",),
        nargs="?",
        const=True,
        metavar="TOKEN",
        help="Token of the Hugging Face hub; without a value, the one that `hf auth login` stored. Default: $HF_TOKEN, "
        "else the stored one.",
    )
    hints = get_type_hints(EngineConfig)
    left = {f.name: f for f in fields(EngineConfig) if f.name != "model"}
    for title, helps in ENGINE_HELP.items():
        group = parser.add_argument_group(title)
        for name, text in helps.items():
            _add(group, left.pop(name), hints[name], text)
    for name, config_field in left.items():
        _add(parser, config_field, hints[name], "")


def add_dry_run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Print how much memory the model needs and how many requests fit, then exit without loading the model.",
    )
    group.add_argument("--json", action="store_true", help="Print the report of --dry-run as JSON.")


def _add(group: Any, config_field: "Field[Any]", hint: Any, text: str) -> None:
    flag = "--" + config_field.name.replace("_", "-")
    default = None if config_field.default is MISSING else config_field.default
    described = f"{text} Default: {_UNSET.get(config_field.name) or _shown(default)}.".strip()
    if hint in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=described)
    elif config_field.name == "served_model_name":
        group.add_argument(flag, nargs="+", metavar="NAME", default=[], help=f"{text} Default: MODEL.")
    elif config_field.name == "lora_modules":
        group.add_argument(flag, nargs="+", metavar="NAME=FOLDER", default=[], help=f"{text} Default: none.")
    elif config_field.name == "cudagraph_capture_sizes":
        described = f"{text} Default: powers of two to 16, multiples of 16 to 512, then of 32, up to --max-num-seqs."
        group.add_argument(flag, type=int, nargs="+", metavar="N", default=[], help=described)
    elif get_origin(hint) is Literal:
        choices = (*get_args(hint), *_ALIASES.get(config_field.name, ()))
        group.add_argument(flag, choices=choices, default=default, help=described)
    else:
        kind = _TYPES.get(config_field.name, _plain_type(hint))
        flags = (flag, *_SHORT_FLAGS.get(config_field.name, ()))
        group.add_argument(*flags, type=kind, default=default, metavar=_metavar(kind), help=described)


def _plain_type(hint: Any) -> Any:
    kinds = {kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)}
    return size if int in kinds else float if float in kinds else str


def _metavar(kind: Any) -> str:
    return {int: "N", size: "N", size_or_auto: "N", float: "X", json_object: "JSON"}.get(kind, "TEXT")


#: Field whose default is None -> text of the default in the help.
_UNSET = {
    "async_scheduling": "on one GPU, without speculative decoding",
    "chat_template": "the model's",
    "download_dir": "the cache of the hub",
    "gpu_memory_utilization": "0.9 on a GPU, else see --kv-cache-memory-bytes",
    "kv_cache_memory_bytes": "on a CPU, half of the free memory up to 4 GiB, a quarter of it if that is more",
    "max_model_len": "auto",
    "max_num_batched_tokens": "8192 on a GPU, else 2048",
    "max_num_seqs": "1024 on a GPU of 70 GiB or more, else 256",
    "max_step_ms": "200 on a CPU, else 0",
    "num_gpu_blocks_override": "as many as fit",
    "num_threads": "one per CPU core that this process may use",
    "revision": "the hub's default",
    "tokenizer": "the model's",
    "trace": "no recording",
}


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default is None else str(default)
