"""Divides memory between weights, KV cache and swap space, before a model is loaded. Pure.

Two figures count. The *limit*, the memory of the machine or its container, decides the longest request (`fitting_len`):
it does not change between starts, so equal pods accept equal lengths. The *free* memory decides the size of the KV
cache (`size_kv`), which holds at least one request of that length; with less free memory the engine does not start.
"""

from dataclasses import dataclass, fields, replace

from octavo_engine.devices.memory import (
    GIB,
    MIB,
    PROCESS_BYTES,
    HostMemory,
    MemoryInfo,
    size,
)
from octavo_engine.settings.config import EngineConfig, batched_tokens, most_seqs
from octavo_engine.wire.errors import StartupError

_HALF_UP_TO_BYTES = 4 * GIB
_SMALL_CACHE_GB = 0.1  # room for the images of some requests
_MOST_OF_FREE = 0.9  # share that --gpu-memory-utilization may take of the free memory
_MOST_BLOCKS = 1 << 16  # default limit, as block tables take memory; flags or max_num_seqs may require more
_LESS = 0.05  # share that the remedy gives back when a start runs out of memory
_LEAST_TOKENS = 512  # a shorter length that only memory dictates is an error
_LARGE_GPU_BYTES = 70 * GIB  # from this size on, the default below, as in vLLM
_LARGE_GPU_SEQS = 1024
_WHOLE_TOKENS = 1024  # machines of one kind differ by some MiB: round down to it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """A model's memory needs in one dtype. `set_kv_bytes`: the KV cache size that the user set; None: not set.
    `reserve_bytes`: memory that the engine needs beside weights, KV cache and swap space. `adapters_bytes`: the part of
    `weights_bytes` that is reserved for adapters. `images_bytes`: memory for the images of requests."""

    weights_bytes: int
    bytes_per_block: int
    adapters_bytes: int = 0
    images_bytes: int = 0
    set_kv_bytes: int | None = None
    reserve_bytes: int = PROCESS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSize:
    num_blocks: int
    num_host_blocks: int
    kv_bytes: int


def with_max_num_seqs(config: EngineConfig, memory: MemoryInfo) -> EngineConfig:
    """Return the settings with the user's `max_num_seqs`, or one that the memory and the largest step have room for."""
    is_large = memory.is_gpu and memory.total_bytes >= _LARGE_GPU_BYTES
    has_room = batched_tokens(config, "cuda") >= _LARGE_GPU_SEQS
    default = _LARGE_GPU_SEQS if is_large and has_room else most_seqs(config)
    return replace(config, max_num_seqs=config.max_num_seqs or default)


def with_host(config: EngineConfig, host: HostMemory) -> EngineConfig:
    """Return the settings for the ranks of a host."""
    own = {field.name: getattr(host, field.name) for field in fields(host)}
    return replace(config, **{name: value for name, value in own.items() if name not in ("memory", "name")})


def set_kv_bytes(config: EngineConfig, bytes_per_block: int) -> int | None:
    """Return the KV cache size in a host's settings; None if none is set."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override * bytes_per_block
    return config.kv_cache_memory_bytes


def default_kv_bytes(rest_bytes: int, num_engines: int = 1) -> int:
    """Return one engine's share of the default KV cache: half of `rest_bytes` up to 4 GiB, but at least a quarter."""
    rest_bytes = max(0, rest_bytes)
    return max(min(_HALF_UP_TO_BYTES, rest_bytes // 2), rest_bytes // 4) // num_engines


def fitting_len(config: EngineConfig, model: ModelMemory, memory: MemoryInfo, *, longest: int) -> int:
    """Return the most tokens of a request, up to `longest`, whose KV has room within the memory limit.

    Raises StartupError if the limit leaves no room for a useful length.
    """
    kv_bytes = model.set_kv_bytes
    by_limit = kv_bytes_by_limit(config, model, memory) if kv_bytes is None else kv_bytes
    fitting = by_limit // model.bytes_per_block * config.block_size
    if fitting >= longest:
        return longest
    if kv_bytes is not None:
        return max(fitting, 1)  # `size_kv` raises an error if there is not even one block
    if fitting < _LEAST_TOKENS:
        raise StartupError(_no_room(config, model, memory, by_limit), code="OutOfMemory")
    return fitting // _WHOLE_TOKENS * _WHOLE_TOKENS or fitting


def fits_limit(config: EngineConfig, model: ModelMemory, memory: MemoryInfo, *, max_model_len: int) -> bool:
    """Return whether weights, swap space and the KV cache of one request of this length stay within the limit.

    If the length is not set, the request must fit into the part of the memory that `fitting_len` gives the KV cache.
    """
    taken, limit = _taken_bytes(config, model, memory), memory.total_bytes // memory.num_engines
    if model.set_kv_bytes is not None:
        return taken + model.set_kv_bytes <= limit
    needed = -(-max_model_len // config.block_size) * model.bytes_per_block
    is_roomy = config.max_model_len is not None or needed <= kv_bytes_by_limit(config, model, memory)
    return is_roomy and taken + needed <= limit


def size_kv(config: EngineConfig, model: ModelMemory, memory: MemoryInfo, *, max_model_len: int) -> KVSize:
    """Compute the size of the KV cache. `memory`: before the weights are loaded.

    Raises StartupError if a request of `max_model_len` tokens, or the size that was set, does not fit.
    """
    blocks_per_seq = -(-max_model_len // config.block_size)
    free = _free_bytes(config, model, memory)
    _check_host(config, memory)
    if model.set_kv_bytes is not None:
        num_blocks = model.set_kv_bytes // model.bytes_per_block
        if num_blocks < blocks_per_seq:
            raise StartupError(_too_small(config, num_blocks, max_model_len, model), code="OutOfMemory")
    else:
        most = max(_MOST_BLOCKS, most_seqs(config) * blocks_per_seq)
        num_blocks = min(_kv_bytes_by_free(config, model, memory, free) // model.bytes_per_block, most)
    num_blocks = max(num_blocks, blocks_per_seq)
    if num_blocks * model.bytes_per_block > free or memory.available_bytes < model.weights_bytes:
        raise StartupError(_too_little_free(config, model, memory, num_blocks, max_model_len), code="OutOfMemory")
    return KVSize(
        num_blocks=num_blocks,
        num_host_blocks=_swap_bytes(config) // model.bytes_per_block,
        kv_bytes=num_blocks * model.bytes_per_block,
    )


def kv_bytes_by_limit(config: EngineConfig, model: ModelMemory, memory: MemoryInfo) -> int:
    """Return the size of the KV cache on a machine where nothing else runs, if it is not set."""
    taken = _taken_bytes(config, model, memory)
    share = _utilization(config, memory)
    if share is not None:
        return max(0, int(share * memory.total_bytes) - taken)
    return default_kv_bytes(memory.total_bytes - taken, memory.num_engines)


def _kv_bytes_by_free(config: EngineConfig, model: ModelMemory, memory: MemoryInfo, free: int) -> int:
    if memory.utilization is not None:
        unused = (1 - (config.gpu_memory_utilization or memory.utilization)) * memory.total_bytes
        return max(0, min(kv_bytes_by_limit(config, model, memory), int(free - unused)))
    if config.gpu_memory_utilization is not None:
        return min(kv_bytes_by_limit(config, model, memory), int(_MOST_OF_FREE * free))
    return default_kv_bytes(free, memory.num_engines)


def _utilization(config: EngineConfig, memory: MemoryInfo) -> float | None:
    """Return the share of the memory limit for this engine; engines that share a GPU divide the default."""
    if config.gpu_memory_utilization is None and memory.utilization is not None:
        return memory.utilization / memory.num_engines
    return config.gpu_memory_utilization


def _taken_bytes(config: EngineConfig, model: ModelMemory, memory: MemoryInfo) -> int:
    taken = model.reserve_bytes + model.weights_bytes + model.images_bytes
    return taken + (0 if memory.is_gpu else _swap_bytes(config))


def _free_bytes(config: EngineConfig, model: ModelMemory, memory: MemoryInfo) -> int:
    """Return the available memory less weights and images, less the largest step (GPU) or the swap space (CPU)."""
    beside = model.images_bytes + (model.reserve_bytes if memory.is_gpu else _swap_bytes(config))
    return max(0, memory.available_bytes - model.weights_bytes - beside)


def _check_host(config: EngineConfig, memory: MemoryInfo) -> None:
    host = memory.host_available_bytes
    if host is not None and _swap_bytes(config) > host:
        raise StartupError(
            f"--swap-space {config.swap_space:g} takes {size(_swap_bytes(config))} of the host's memory, but only "
            f"{size(host)} are available: lower it to at most {host // MIB / 1024:.2f}.",
            code="OutOfMemory",
        )


def _swap_bytes(config: EngineConfig) -> int:
    return int(config.swap_space * GIB)


def describe_lack_at_start(config: EngineConfig, memory: MemoryInfo) -> str:
    """Return the error of a GPU whose memory ran out although the plan fitted, with a flag to lower and by how much."""
    if config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None:
        flag = "--num-gpu-blocks-override" if config.num_gpu_blocks_override is not None else "--kv-cache-memory-bytes"
        given = config.num_gpu_blocks_override or config.kv_cache_memory_bytes or 0
        remedy = f"{flag} from {given} to {int(given * (1 - _LESS))}"
    else:
        share = _utilization(config, memory) or 1.0
        remedy = f"--gpu-memory-utilization from {share:g} to {max(0.01, round(share - _LESS, 2)):g}"
    return f"the GPU ran out of memory while the engine started: lower {remedy}, or lower --max-num-batched-tokens."


def _no_room(config: EngineConfig, model: ModelMemory, memory: MemoryInfo, kv_bytes: int) -> str:
    share = _utilization(config, memory)
    limited = f"{size(memory.total_bytes)} of memory" + (f" times --gpu-memory-utilization {share:g}" if share else "")
    shared = f" for {memory.num_engines} engines" if memory.num_engines > 1 else ""
    swap = f", its swap space {size(_swap_bytes(config))}" if config.swap_space and not memory.is_gpu else ""
    swap += f", its images {size(model.images_bytes)}" if model.images_bytes else ""
    other, remedy = ("largest step", ", lower --max-num-batched-tokens") if memory.is_gpu else ("processes", "")
    remedy += _less_for_images(config, model, memory)
    return (
        f"the model does not fit: of {limited}{shared}, its weights take {size(model.weights_bytes)}{swap} and its "
        f"{other} {size(model.reserve_bytes)}; {size(kv_bytes)} of the rest are for the KV cache, less than "
        f"{_LEAST_TOKENS} tokens: use a smaller model, give it more memory{remedy}, or set a short --max-model-len."
    )


def _less_for_images(config: EngineConfig, model: ModelMemory, memory: MemoryInfo) -> str:
    """Return a remedy for images that take much of a CPU's memory. 0 keeps room for images that are not cached."""
    is_large = config.mm_processor_cache_gb == 0 or config.mm_processor_cache_gb > _SMALL_CACHE_GB
    if not is_large or not model.images_bytes or memory.is_gpu:
        return ""
    return f", or set --mm-processor-cache-gb {_SMALL_CACHE_GB}"


def _too_small(config: EngineConfig, num_blocks: int, max_model_len: int, model: ModelMemory) -> str:
    fits = num_blocks * config.block_size
    needed_blocks = -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        raise_flag = f"raise --num-gpu-blocks-override to at least {needed_blocks}"
    else:
        raise_flag = f"raise --kv-cache-memory-bytes to at least {needed_blocks * model.bytes_per_block}"
    shorter = f"lower --max-model-len to at most {fits}, or " if fits else ""
    return (
        f"a request of full length does not fit: the KV cache has {size(num_blocks * model.bytes_per_block)} "
        f"({num_blocks} blocks of {config.block_size} tokens), but one request of max_model_len={max_model_len} tokens "
        f"needs {size(needed_blocks * model.bytes_per_block)}: {shorter}{raise_flag}."
    )


def _too_little_free(
    config: EngineConfig, model: ModelMemory, memory: MemoryInfo, num_blocks: int, max_model_len: int
) -> str:
    fits = _free_bytes(config, model, memory) // model.bytes_per_block * config.block_size
    swap = f", swap space {size(_swap_bytes(config))}" if config.swap_space else ""
    swap = f", largest step {size(model.reserve_bytes)}" if memory.is_gpu else swap
    swap += f", images {size(model.images_bytes)}" if model.images_bytes else ""
    if model.set_kv_bytes is not None:
        kv, remedy = "KV cache", "lower --kv-cache-memory-bytes, --num-gpu-blocks-override or --swap-space"
    else:
        kv = f"KV cache of one request of {max_model_len} tokens"
        remedy = f"set --max-model-len to at most {fits}" if fits else "use a smaller model"
    beside = model.images_bytes + (model.reserve_bytes if memory.is_gpu else _swap_bytes(config))
    needed = model.weights_bytes + beside + num_blocks * model.bytes_per_block
    remedy += _less_for_images(config, model, memory)
    remedy = f"end other programs, or {remedy}" if needed <= memory.total_bytes else remedy
    return (
        f"the model does not fit into the free memory: weights {size(model.weights_bytes)}{swap} and {kv} "
        f"{size(num_blocks * model.bytes_per_block)}, but only {size(memory.available_bytes)} of "
        f"{size(memory.total_bytes)} of memory are available: {remedy}."
    )
