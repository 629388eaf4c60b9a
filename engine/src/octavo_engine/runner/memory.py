"""Computes the number of KV blocks from flags, or from the device's free memory once the weights are loaded.

The KV cache must hold at least one sequence of full length, so that every admitted request fits; with less memory the
engine does not start, and the error states the remedy.
"""

from dataclasses import dataclass
from pathlib import Path

from octavo_engine.config import EngineConfig
from octavo_engine.runner.cgroup import CgroupLimits
from octavo_engine.wire.errors import StartupError

GIB = 1 << 30
MIB = 1 << 20
KV_SPACE_VARIABLES = ("OCTAVO_CPU_KVCACHE_SPACE", "VLLM_CPU_KVCACHE_SPACE")
_CPU_KV_SHARE = 0.5  # share of the available memory
_CPU_KV_MOST_BYTES = 4 * GIB
_MOST_BLOCKS = 1 << 16  # default limit, as block tables take memory; flags or max_num_seqs may require more


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSize:
    num_blocks: int
    num_host_blocks: int
    kv_bytes: int


def host_memory(limits: CgroupLimits, root: Path = Path("/")) -> MemoryInfo:
    """Return the total and available memory of the machine, or of the container if that is less."""
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024
    total = min(fields["MemTotal"], limits.memory_bytes or fields["MemTotal"])
    available = fields.get("MemAvailable", fields["MemFree"])
    if limits.memory_available_bytes is not None:
        available = min(available, limits.memory_available_bytes)
    return MemoryInfo(total_bytes=total, available_bytes=available)


def free_memory_for_kv(memory: MemoryInfo, num_engines: int = 1) -> int:
    """Return the default bytes of each engine's KV cache on a CPU."""
    return min(_CPU_KV_MOST_BYTES, int(memory.available_bytes * _CPU_KV_SHARE / num_engines))


def size_kv(
    config: EngineConfig, *, max_model_len: int, bytes_per_block: int, memory: MemoryInfo, default_kv_bytes: int
) -> KVSize:
    """Compute the size of the KV cache. Raises StartupError if a sequence of `max_model_len` tokens does not fit."""
    blocks_per_seq = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // bytes_per_block
    else:
        most = max(_MOST_BLOCKS, config.max_num_seqs * blocks_per_seq)
        num_blocks = min(default_kv_bytes // bytes_per_block, most)
    if num_blocks < blocks_per_seq:
        message = _too_small(config, num_blocks, max_model_len, bytes_per_block, memory)
        raise StartupError(message, code="OutOfMemory")
    num_host_blocks = int(config.swap_space * GIB) // bytes_per_block
    _check_available(config, num_blocks + num_host_blocks, bytes_per_block, memory)
    return KVSize(num_blocks=num_blocks, num_host_blocks=num_host_blocks, kv_bytes=num_blocks * bytes_per_block)


def _too_small(
    config: EngineConfig, num_blocks: int, max_model_len: int, bytes_per_block: int, memory: MemoryInfo
) -> str:
    fits = num_blocks * config.block_size
    needed_blocks = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        raise_flag = f"raise --num-gpu-blocks-override to at least {needed_blocks}"
    else:
        raise_flag = f"raise --kv-cache-memory-bytes to at least {needed_blocks * bytes_per_block}"
    shorter = f"lower --max-model-len to at most {fits}, or " if fits else ""
    return (
        f"a request of full length does not fit: the KV cache has {_size(num_blocks * bytes_per_block)} ({num_blocks} "
        f"blocks of {config.block_size} tokens; {_size(memory.available_bytes)} of memory are available), but one "
        f"sequence of max_model_len={max_model_len} tokens needs {_size(needed_blocks * bytes_per_block)}: "
        f"{shorter}{raise_flag}."
    )


def _check_available(config: EngineConfig, blocks: int, bytes_per_block: int, memory: MemoryInfo) -> None:
    if blocks * bytes_per_block > memory.available_bytes:
        raise StartupError(
            f"the KV cache and swap space do not fit: they take {_size(blocks * bytes_per_block)}, but only "
            f"{_size(memory.available_bytes)} of memory are available: lower --kv-cache-memory-bytes, "
            f"--num-gpu-blocks-override or --swap-space.",
            code="OutOfMemory",
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
