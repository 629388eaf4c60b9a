"""Computes a model's memory and KV capacity without loading it, for `octavo serve --dry-run`.

`plan_memory` decides for a dry run as for a start, so that the result equals what a start would report. Only headers
are read: `config.json`, or the header of a GGUF file.
"""

from dataclasses import dataclass

from octavo_engine.devices.device import Device, open_device
from octavo_engine.runner.checkpoint import find_draft, read_checkpoint
from octavo_engine.runner.rank_plans import divide_threads, plan_ranks
from octavo_engine.settings.config import EngineConfig, most_seqs
from octavo_engine.sources.model_config import context_length
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_files, with_local_adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Sizes and limits of an engine. `available_bytes`: free memory before loading. `file_bytes`: weights on disk.
    `adapters_bytes`: reserved for the adapters in memory. Sizes are sums over all ranks; `rank_weights_bytes` and
    `rank_kv_bytes` have an entry per rank.
    """

    architecture: str
    dtype: str
    device: str
    file_bytes: int
    weights_bytes: int
    adapters_bytes: int
    context_length: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    num_host_blocks: int
    bytes_per_block: int
    kv_bytes: int
    total_bytes: int
    available_bytes: int
    rank_weights_bytes: tuple[int, ...]
    rank_kv_bytes: tuple[int, ...]

    @property
    def kv_bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def full_length_requests(self) -> float:
        """The number of requests of `max_model_len` tokens that fit; at most `max_num_seqs` of them run together."""
        return self.kv_tokens / self.max_model_len


def plan_capacity(config: EngineConfig) -> Capacity:
    """Compute the capacity. Raises StartupError where a start would raise it, also for insufficient memory."""
    device = open_device(config.device)
    config = divide_threads(config, device)
    device.prepare(config)
    files = resolve_files(config)
    return capacity_of(with_local_adapters(config), device, files)


def capacity_of(config: EngineConfig, device: Device, files: ModelFiles) -> Capacity:
    target = read_checkpoint(config, files)
    draft = find_draft(config, device, target)
    plans = plan_ranks(config, device, target.config, target.stored, draft)
    ranks, plan = plans.ranks, plans.ranks[0]
    weights = tuple(each.model.weights_bytes - each.model.adapters_bytes for each in ranks)
    kv = tuple(each.kv.kv_bytes for each in ranks)
    weight_files = files.weight_files if draft is None else (*files.weight_files, *draft.files.weight_files)
    return Capacity(
        architecture=target.config.architecture,
        dtype=str(plan.dtype).removeprefix("torch."),
        device=device.name,
        file_bytes=sum(path.stat().st_size for path in weight_files),
        weights_bytes=sum(weights),
        adapters_bytes=plan.model.adapters_bytes,
        context_length=context_length(target.config),
        max_model_len=plan.max_model_len,
        max_num_seqs=most_seqs(plans.config),
        block_size=config.block_size,
        num_blocks=plan.kv.num_blocks,
        num_host_blocks=plan.kv.num_host_blocks,
        bytes_per_block=sum(each.model.bytes_per_block for each in ranks),
        kv_bytes=sum(kv),
        total_bytes=sum(each.memory.total_bytes for each in ranks),
        available_bytes=sum(each.memory.available_bytes for each in ranks),
        rank_weights_bytes=weights,
        rank_kv_bytes=kv,
    )
