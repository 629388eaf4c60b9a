"""`octavo serve --dry-run`: reports a model's memory, the length and load that fit, and the flags that change them."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from octavo_engine.loop.start import find_capacity
from octavo_engine.settings.config import EngineConfig, adapters_in_memory
from octavo_engine.wire.errors import StartupError

if TYPE_CHECKING:
    from octavo_engine.runner.capacity import Capacity

_GIB = 1 << 30
_MIB = 1 << 20
_EXAMPLE_TOKENS = 2048


def dry_run(config: EngineConfig, args: argparse.Namespace) -> int:
    try:
        capacity = find_capacity(config)
    except StartupError as error:
        print(json.dumps({"error": str(error)}) if args.json else f"octavo: {error}", file=sys.stderr)
        return 1
    print(as_json(config, capacity) if args.json else describe(config, capacity))
    return 0


def as_json(config: EngineConfig, capacity: "Capacity") -> str:
    derived = {
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "kv_tokens": capacity.kv_tokens,
        "full_length_requests": capacity.full_length_requests,
    }
    return json.dumps({"model": config.model, **asdict(capacity), **derived}, indent=2)


def describe(config: EngineConfig, capacity: "Capacity") -> str:
    c = capacity
    left = c.available_bytes - c.weights_bytes - c.adapters_bytes - c.kv_bytes - c.num_host_blocks * c.bytes_per_block
    on_disk = f" ({size(c.file_bytes)} on disk)" if c.file_bytes else ""
    rows = [
        ("model", f"{config.model} ({c.architecture}), {c.dtype} on {c.device}"),
        ("weights", f"{size(c.weights_bytes)} in memory{on_disk}"),
        (
            "KV cache",
            f"{size(c.kv_bytes)}: {c.num_blocks:,} blocks of {c.block_size} tokens = {c.kv_tokens:,} tokens, "
            f"{size(int(c.kv_bytes_per_token))} each",
        ),
        ("at once", _at_once(c)),
        ("memory", f"{size(c.available_bytes)} of {size(c.total_bytes)} available; {size(left)} remain free"),
    ]
    if c.num_host_blocks:
        swap = f"{size(c.num_host_blocks * c.bytes_per_block)}: {c.num_host_blocks:,} blocks"
        rows.insert(3, ("swap space", swap))
    if len(c.rank_weights_bytes) > 1:
        ranks = zip(c.rank_weights_bytes, c.rank_kv_bytes, strict=True)
        parts = [f"{rank}: weights {size(weights)}, KV cache {size(kv)}" for rank, (weights, kv) in enumerate(ranks)]
        rows.insert(3, ("ranks", "; ".join(parts)))
    if c.adapters_bytes:
        flag = "--max-loras" if config.max_cpu_loras is None else "--max-cpu-loras"
        room = f"reserved for {adapters_in_memory(config)} of rank {config.max_lora_rank} ({flag}, --max-lora-rank)"
        rows.insert(2, ("adapters", f"{size(c.adapters_bytes)} {room}"))
    changes = [f"  {flag:<27} {effect}" for flag, effect in _changes(config, c)]
    return "\n".join([*(f"{name:<11} {text}" for name, text in rows), "", "flags that change these sizes", *changes])


def _at_once(c: "Capacity") -> str:
    lengths = [c.max_model_len, *([_EXAMPLE_TOKENS] if c.max_model_len > _EXAMPLE_TOKENS else [])]
    shown = [f"{c.kv_tokens / length:,.1f} requests of {length:,} tokens" for length in lengths]
    return f"{', or '.join(shown)}; at most {c.max_num_seqs} (--max-num-seqs)"


def _changes(config: EngineConfig, c: "Capacity") -> list[tuple[str, str]]:
    per_gib = int(_GIB / c.kv_bytes_per_token)
    other = ("bfloat16", "halves") if c.dtype == "float32" else ("float32", "at least doubles")
    is_wide = config.kv_cache_dtype == "auto"
    narrow = ("--kv-cache-dtype fp8", "one byte for each value of the KV cache")
    return [
        ("--kv-cache-memory-bytes N", f"the size of the KV cache: each GiB holds {per_gib:,} tokens"),
        (
            "--max-model-len N",
            f"tokens of the longest request, now {c.max_model_len:,} of {c.context_length:,}; if halved, twice as many "
            "longest requests fit",
        ),
        ("--max-num-seqs N", f"largest number of requests in a step, now {c.max_num_seqs}"),
        (f"--dtype {other[0]}", f"{other[1]} the memory of the weights{' and of a token in the KV cache' * is_wide}"),
        *([narrow] if is_wide and c.device == "cuda" else []),
        ("--swap-space GIB", "CPU memory for preempted requests, in addition to the KV cache"),
        ("--num-gpu-blocks-override N", f"the number of KV blocks, now {c.num_blocks:,}"),
    ]


def size(num_bytes: int) -> str:
    if abs(num_bytes) >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB" if abs(num_bytes) >= _MIB else f"{num_bytes / 1024:.1f} KiB"
