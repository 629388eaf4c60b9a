"""Chooses dtype, `max_model_len` and KV cache size before a model is loaded, for a real start as for a dry run.

The model is built on torch's meta device, which has shapes but no memory. dtype and length depend on the memory limit
of the machine or its container, not on the memory that is free at the moment, so that equal pods make equal choices.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from octavo_engine.devices.cgroup import read_limits
from octavo_engine.devices.cuda_device import graph_buckets
from octavo_engine.devices.device import Device
from octavo_engine.devices.memory import GIB, MIB, HostMemory, MemoryInfo, size
from octavo_engine.devices.recorded_steps import MOST_BYTES
from octavo_engine.layers.group_method import GroupMethod
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.moe import Experts
from octavo_engine.media.processed_images import UNCACHED_BYTES
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.group_tensor import WeightFormat
from octavo_engine.ops.native_quantised import QuantisedFormat
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages
from octavo_engine.runner.checkpoint import Checkpoint
from octavo_engine.runner.kv_cache_size import (
    KVSize,
    ModelMemory,
    fits_limit,
    fitting_len,
    kv_bytes_by_limit,
    set_kv_bytes,
    size_kv,
    with_host,
)
from octavo_engine.runner.lora_terms import adapters_bytes
from octavo_engine.runner.weight_formats import StoredTensors, kept_formats, loaded_format
from octavo_engine.settings.config import EngineConfig, batched_tokens, ranks_per_host
from octavo_engine.settings.records import ModelConfig, ModelImpl
from octavo_engine.sources.model_config import context_length
from octavo_engine.wire.errors import StartupError

_LOGGER = logging.getLogger(__name__)
#: Measured memory of a process that decodes images: Python with the image processor of transformers.
MEDIA_WORKER_BYTES = 128 * MIB
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`memory`: the machine's memory before loading. `model`: memory needs in `dtype`. `kv_dtype`: dtype of the KV
    cache. `model_impl`: the user's setting. `block_formats`: formats of the tensors that may stay quantised in memory,
    by name. `quantise_to`: the format to which other weights are quantised.
    """

    model_impl: ModelImpl
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    model: ModelMemory
    kv: KVSize
    memory: MemoryInfo
    block_formats: Mapping[str, WeightFormat] = field(default_factory=dict)
    quantise_to: WeightFormat | None = None


def plan_memory(
    config: EngineConfig,
    device: Device,
    model_config: ModelConfig,
    stored: StoredTensors | None = None,
    draft: Checkpoint | None = None,
    *,
    group: Group | None = None,
    stages: Stages | None = None,
    host: HostMemory | None = None,
) -> MemoryPlan:
    """Plan the memory of one rank. Raises StartupError for an invalid length, and for a model that does not fit.

    `stored`: the tensors of a quantised checkpoint, which may stay in blocks. `draft`: a draft model, which adds its
    needs. `group`, `stages`: the ranks that divide the model; None: there is one. `host`: of the rank; None: this one.
    """
    host = host or own_memory(config, device)
    config, longest, memory = with_host(config, host), longest_request(config, model_config), host.memory
    dtype = first_dtype(config, device, model_config, stored)

    def model_memory(dtype: torch.dtype, max_model_len: int) -> ModelMemory:
        model = build_on_meta(config, device, model_config, stored, dtype, max_model_len, group, stages)
        target = _model_memory(config, device, model, dtype, max_model_len)
        if draft is None:
            return target
        own = replace(config, enable_lora=False, quantization=None)  # both belong to the target
        model = build_on_meta(own, device, draft.config, draft.stored, dtype, max_model_len)
        settings = (own, replace(own, enforce_eager=True))
        return _sum(config, target, *(_model_memory(each, device, model, dtype, max_model_len) for each in settings))

    model = model_memory(dtype, longest)
    may_halve = config.dtype == "auto" and dtype == torch.float32
    if may_halve and not fits_limit(config, model, memory, max_model_len=longest):
        _LOGGER.info(
            "dtype auto: bfloat16, as float32 leaves no room for requests of %d tokens in %s of memory; "
            "--dtype float32 selects it anyway",
            *(longest, size(memory.total_bytes)),
        )
        dtype = torch.bfloat16
        model = model_memory(dtype, longest)
    max_model_len = longest
    if config.max_model_len is None:
        max_model_len = fitting_len(config, model, memory, longest=longest)
    if max_model_len < longest:  # RoPE's table, which counts as weights, becomes smaller
        model = model_memory(dtype, max_model_len)
    kv = size_kv(config, model, memory, max_model_len=max_model_len)
    _warn_if_cut(config, model, memory, kv)
    return MemoryPlan(
        model_impl=config.model_impl,
        dtype=dtype,
        kv_dtype=_cache_dtype(config, dtype),
        max_model_len=max_model_len,
        model=model,
        kv=kv,
        memory=memory,
        block_formats=kept_formats(stored or {}, device, dtype),
        quantise_to=loaded_format(config, device),
    )


def _cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the KV cache's dtype for a model in `dtype`."""
    return dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def first_dtype(config: EngineConfig, device: Device, model: ModelConfig, stored: StoredTensors | None) -> torch.dtype:
    """Return the dtype to try first; it is used if the model fits."""
    dtype = _DTYPES.get(config.dtype) or _block_dtype(stored or {}, loaded_format(config, device), device)
    return dtype or device.default_dtype(model)


def _block_dtype(stored: StoredTensors, quantise_to: WeightFormat | None, device: Device) -> torch.dtype | None:
    """Return bfloat16 if tensors can stay quantised in blocks with it, which saves memory and time; None otherwise.

    A GPU multiplies groups in any of its default dtypes.
    """
    kept = [quantise_to] if quantise_to is not None else kept_formats(stored, device, torch.bfloat16).values()
    if not any(isinstance(each, QuantisedFormat) for each in kept):
        return None
    _LOGGER.info("dtype auto: bfloat16, in which quantised weights stay as they are in memory")
    return torch.bfloat16


def planned_weights_bytes(model: Model) -> int:
    """Return the bytes of the packed weights: a tied head may become a copy, a weight may be kept in two layouts."""
    linears = (module for module in model.modules() if isinstance(module, Linear))
    return model.weights_bytes() + sum(linear.bytes_added_by_packing() for linear in linears)


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Return the user's `max_model_len`, or the model's. Raises StartupError above the model's."""
    wanted, longest = config.max_model_len, context_length(model)
    if wanted is None:
        return longest
    if wanted < 1:
        raise StartupError(f"--max-model-len must be at least 1, got {wanted}.")
    if wanted > longest:
        raise StartupError(f"--max-model-len {wanted} exceeds the model's length of {longest}: use at most {longest}.")
    return wanted


def build_on_meta(
    config: EngineConfig,
    device: Device,
    model: ModelConfig,
    stored: StoredTensors | None,
    dtype: torch.dtype,
    longest: int,
    group: Group | None = None,
    stages: Stages | None = None,
) -> Model:
    """Build a model on the meta device."""
    return build_model(
        model,
        impl=config.model_impl,
        dtype=dtype,
        device="meta",
        max_model_len=longest,
        block_formats=kept_formats(stored or {}, device, dtype),
        quantise_to=loaded_format(config, device),
        group=group,
        stages=stages,
    )


def _model_memory(config: EngineConfig, device: Device, model: Model, dtype: torch.dtype, longest: int) -> ModelMemory:
    adapters = adapters_bytes(config, device, model)
    cache = device.attention_backend(model.kv_specs(), config.block_size, _cache_dtype(config, dtype))
    bytes_per_block = cache.bytes_per_block()
    return ModelMemory(
        weights_bytes=adapters + (planned_weights_bytes(model) if device.packs_weights else model.weights_bytes()),
        adapters_bytes=adapters,
        bytes_per_block=bytes_per_block,
        reserve_bytes=device.reserve_bytes(replace(config, max_model_len=longest), model.config, dtype)
        + _experts_bytes(config, device, model)
        + _expanded_bytes(config, model)
        + (MOST_BYTES if device.name == "cpu" and model.calls_torch and not config.enforce_eager else 0),
        images_bytes=_images_bytes(config, device, model, longest),
        set_kv_bytes=set_kv_bytes(config, bytes_per_block),
    )


def _experts_bytes(config: EngineConfig, device: Device, model: Model) -> int:
    """Return the memory that a GPU needs for one layer's experts, in the largest step and in the largest graph.

    A CPU computes one expert at a time.
    """
    values = max((each.values_per_row for each in model.modules() if isinstance(each, Experts)), default=0)
    if device.name == "cpu":
        return 0
    rows = batched_tokens(config, device.name) + max((each.num_tokens for each in graph_buckets(config)), default=0)
    return rows * values * model.build.dtype.itemsize


def _expanded_bytes(config: EngineConfig, model: Model) -> int:
    """Return the memory for one expanded copy of the largest group-quantised weight, and for another one in graphs."""
    methods = (module.method for module in model.modules() if isinstance(module, Linear))
    sizes = (each.expanded_bytes for each in methods if isinstance(each, GroupMethod))
    return max(sizes, default=0) * (2 if graph_buckets(config) else 1)


def _images_bytes(config: EngineConfig, device: Device, model: Model, longest: int) -> int:
    """Return the memory of the encoding of the largest image, and of a full `EncoderCache`.

    On a CPU, this includes images that are not encoded yet, and the processes that decode images.
    """
    most_tokens = 0 if model.config.vision is None else model.config.vision.most_tokens
    if model.tower is None or not most_tokens:
        return 0
    num_rows = max(batched_tokens(config, device.name), min(most_tokens, longest))
    encoded_bytes = model.tower.activation_bytes + num_rows * model.tower.row_bytes
    if device.name != "cpu":
        return encoded_bytes
    processed_bytes = int(config.mm_processor_cache_gb * GIB) or UNCACHED_BYTES
    return encoded_bytes + processed_bytes + num_media_workers(config) * MEDIA_WORKER_BYTES


def num_media_workers(config: EngineConfig) -> int:
    cpus = read_limits().cpus or len(os.sched_getaffinity(0))
    return config.media_workers or min(max(int(cpus / 4), 1), 4)


def _sum(config: EngineConfig, target: ModelMemory, draft: ModelMemory, eager_draft: ModelMemory) -> ModelMemory:
    """Return the needs of target and draft model together. Their steps alternate and share memory, but their graphs do
    not."""
    bytes_per_block = target.bytes_per_block + draft.bytes_per_block
    return replace(
        target,
        weights_bytes=target.weights_bytes + draft.weights_bytes,
        bytes_per_block=bytes_per_block,
        reserve_bytes=target.reserve_bytes + draft.reserve_bytes - eager_draft.reserve_bytes,
        set_kv_bytes=set_kv_bytes(config, bytes_per_block),
    )


def log_length(config: EngineConfig, longest: int, host: HostMemory, plan: MemoryPlan) -> None:
    """Log the length that was chosen for all ranks by the plan of one. `config`: the user's."""
    if config.max_model_len is not None:
        return
    model, memory, chosen = plan.model, plan.memory, plan.max_model_len
    if chosen == longest:
        _LOGGER.info("max_model_len auto: %d tokens, the model's own length", longest)
        return
    kv_bytes = model.set_kv_bytes
    if kv_bytes is None:
        kv_bytes = kv_bytes_by_limit(with_host(config, host), model, memory)
    _LOGGER.info(
        "max_model_len auto: %d of the model's %d tokens, as many as %s of KV cache hold at %s a token; weights take "
        "%s of %s of memory; --max-model-len sets another length",
        *(chosen, longest, size(kv_bytes)),
        f"{model.bytes_per_block / config.block_size / 1024:.1f} KiB",
        *(size(model.weights_bytes), size(memory.total_bytes)),
    )


def _warn_if_cut(config: EngineConfig, model: ModelMemory, memory: MemoryInfo, kv: KVSize) -> None:
    wanted = kv_bytes_by_limit(config, model, memory)
    is_share = config.gpu_memory_utilization is not None and model.set_kv_bytes is None
    if is_share and wanted > memory.available_bytes - model.weights_bytes:
        _LOGGER.warning(
            "the KV cache gets %s instead of %s, as only %s of %s of memory are available; "
            "--gpu-memory-utilization is a share of all memory",
            *map(size, (kv.kv_bytes, wanted, memory.available_bytes, memory.total_bytes)),
        )


def own_memory(config: EngineConfig, device: Device) -> HostMemory:
    """Return this host's memory, as its ranks plan with it. Raises StartupError for an invalid environment variable."""
    kv_bytes = config.kv_cache_memory_bytes
    return HostMemory(
        memory=device.memory(ranks_per_host(config)),
        kv_cache_memory_bytes=device.kv_space_bytes() if kv_bytes is None else kv_bytes,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )
