"""`load`: makes an executor from an `EngineConfig`, on every rank, with weights and KV cache, ready for the first plan.

Rank 0 finds the files, plans the memory of all ranks and runs the first steps; other ranks get their part of the plan.
"""

import logging
import time
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import torch

from octavo_engine.devices.device import Device, open_device
from octavo_engine.devices.memory import HostMemory, size
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.ops.message_store import MessageStore
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages, open_ranks, planned_ranks
from octavo_engine.runner.checkpoint import Checkpoint, find_draft, read_checkpoint
from octavo_engine.runner.executor import LocalExecutor
from octavo_engine.runner.kv_cache_size import with_host
from octavo_engine.runner.memory_plan import MemoryPlan, own_memory, plan_memory
from octavo_engine.runner.model_loading import (
    as_failed_start,
    as_startup_error,
    check_nothing,
    load_adapters,
    load_checkpoint,
    load_draft,
    load_vocabulary,
    make_runner,
)
from octavo_engine.runner.rank_plans import RankPlans, divide_threads, plan_ranks, with_blocks
from octavo_engine.settings.config import EngineConfig, batched_tokens, most_seqs, ranks_per_host
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.sources.download_dir import fetched_revision
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_files, with_local_adapters
from octavo_engine.weights.loader import Progress
from octavo_engine.wire.hashing import root_hash
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams

_LOGGER = logging.getLogger(__name__)
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, top_k=50)  # needs all buffers of the sampler


class OtherRanks(Protocol):
    """The ranks of a model other than rank 0. All functions raise StartupError if a rank cannot start."""

    def launch(self, config: EngineConfig, files: ModelFiles, own: HostMemory) -> list[HostMemory]:
        """Start the processes of all ranks but rank 0; return the memory of each host. `own`: memory of the first host,
        which is this one."""
        ...

    def start(self, files: ModelFiles, plans: RankPlans, gpu: torch.device | None) -> tuple[Group, Stages]:
        """Start loading them; return rank 0's connections. `gpu`: rank 0's `Device.group_gpu`."""
        ...

    def check(self) -> None:
        """Check that all ranks still run."""
        ...

    def wait_ready(self) -> int:
        """Wait until they are loaded; return the bytes of their weights."""
        ...

    def run(self, plans: list[StepPlan]) -> None:
        """Start plans on them, which they run in step with rank 0."""
        ...


class RankPart(Protocol):
    """The part of the plan for a rank above 0. `host`, `num_layers`: from `RankPlans`. `address`: its host's address.

    `divides_threads`: see `LoadPart`.
    """

    rank: int
    files: ModelFiles
    host: HostMemory
    num_blocks: int
    num_host_blocks: int
    num_layers: tuple[int, ...]
    address: str
    divides_threads: bool


def load(
    config: EngineConfig,
    *,
    part: RankPart | None = None,
    store: MessageStore | None = None,
    other_ranks: OtherRanks | None = None,
    progress: Progress | None = None,
) -> tuple[LocalExecutor, ReadyInfo]:
    """Load a model, or one rank's part. Raises StartupError, or GroupBroken if the ranks cannot connect.

    `part`, `store`: only for ranks other than 0; their `config` is that of `RankPlans`. `other_ranks`: only for rank 0.
    `progress`: called with (bytes done, total bytes); None shows a progress bar on a terminal.
    """
    device, began_s = open_device(config.device, _place(config, part)), time.perf_counter()
    with as_failed_start(device):
        config = divide_threads(config, device) if part is None or part.divides_threads else config
        device.prepare(config)
        links = (Group(), Stages()) if part is None else _join(config, device, part, store)
        prepared_s = time.perf_counter()

        # Files
        target = read_checkpoint(config, resolve_files(config) if part is None else part.files)
        config = with_local_adapters(config)
        draft = find_draft(config, device, target) if part is None else None

        # Plan
        plans = _plan(config, device, target, draft, part, other_ranks)
        config, plan = plans.config, plans.ranks[0]
        group, stages = links if other_ranks is None else other_ranks.start(target.files, plans, device.group_gpu)

        with as_startup_error(config, plan):
            # Model
            check = check_nothing if other_ranks is None else other_ranks.check
            model = load_checkpoint(device, target, plan, group, config, progress, check, stages=stages)
            draft_model = None if draft is None else load_draft(device, draft, plan, progress, check)

            # Adapters
            adapters, hashes = load_adapters(config, model.model)
            loaded_s = time.perf_counter()

            # Memory
            compiler = GrammarCompiler(lambda: load_vocabulary(config, target.files, target.config))
            runner, memory = make_runner(config, device, model, plan, compiler, adapters, draft=draft_model)

            # Warm-up
            other_bytes = 0 if other_ranks is None else other_ranks.wait_ready()
            if part is None and device.compiles_late:
                steps = warm_up_plans(config, plan, num_tokens=batched_tokens(config, device.name))
                if other_ranks is not None:
                    other_ranks.run(steps)
                runner.warm_up(steps)
    ready = replace(
        _describe(plans, device, model.fingerprint),
        weights_bytes=other_bytes + sum(each.model.weights_bytes() for each in (model, draft_model) if each),
        startup_s={"compile": prepared_s - began_s + time.perf_counter() - loaded_s, "weights": loaded_s - prepared_s},
        adapters=hashes,
        revision=fetched_revision(target.files.root),
    )
    return LocalExecutor(runner, compiler, memory, adapters, model.images), ready


def report_memory(config: EngineConfig) -> HostMemory:
    """Return the memory of this host for its ranks. Raises StartupError if the ranks have not enough memory."""
    device = open_device(config.device, 0)
    divide_threads(config, device)
    return own_memory(config, device)


def _place(config: EngineConfig, part: RankPart | None) -> int:
    """Return the place of a rank among those of its host."""
    return 0 if part is None else part.rank % ranks_per_host(config)


def _join(config: EngineConfig, device: Device, part: RankPart, store: MessageStore | None) -> tuple[Group, Stages]:
    timeout, per_stage = timedelta(seconds=config.distributed_timeout_seconds), config.tensor_parallel_size
    return open_ranks(store, part.rank, per_stage, part.num_layers, timeout, address=part.address, gpu=device.group_gpu)


def _plan(
    config: EngineConfig,
    device: Device,
    target: Checkpoint,
    draft: Checkpoint | None,
    part: RankPart | None,
    other_ranks: OtherRanks | None,
) -> RankPlans:
    """Plan the memory of all ranks; with a `part`, repeat the plan of this rank, on the rank itself."""
    if part is None:
        hosts = [own_memory(config, device)]
        if other_ranks is not None:
            hosts = other_ranks.launch(config, target.files, hosts[0])
        plans = plan_ranks(config, device, target.config, target.stored, draft, hosts)
        _log_ranks(plans)
        return plans
    group, stages = planned_ranks(part.rank, config.tensor_parallel_size, part.num_layers)
    plan = plan_memory(config, device, target.config, target.stored, group=group, stages=stages, host=part.host)
    plan = with_blocks(plan, part.num_blocks, part.num_host_blocks)
    return RankPlans(config=with_host(config, part.host), hosts=[part.host], ranks=[plan])


def _log_ranks(plans: RankPlans) -> None:
    if len(plans.ranks) > 1:
        parts = [f"rank {i}: {size(p.model.weights_bytes)}, {size(p.kv.kv_bytes)}" for i, p in enumerate(plans.ranks)]
        totals = sum(p.model.weights_bytes for p in plans.ranks), sum(p.kv.kv_bytes for p in plans.ranks)
        _LOGGER.info("weights and KV cache: %s; all: %s, %s", "; ".join(parts), *map(size, totals))


def _describe(plans: RankPlans, device: Device, fingerprint: str) -> ReadyInfo:
    config, plan = plans.config, plans.ranks[0]
    dtype = str(plan.dtype).removeprefix("torch.")
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    kind = dtype if kv_dtype == dtype else f"{kv_dtype} of {dtype}"  # values are computed in the model's type
    return ReadyInfo(
        max_model_len=plan.max_model_len,
        adapter_folders={module.name: module.path for module in config.lora_modules},
        num_blocks=plan.kv.num_blocks,
        num_host_blocks=plan.kv.num_host_blocks,
        block_size=config.block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device.name,
        weights_fingerprint=fingerprint,
        hash_root=root_hash(fingerprint, kind, config.block_size),
        weights_bytes=sum(each.model.weights_bytes for each in plans.ranks),
        kv_bytes=sum(each.kv.kv_bytes for each in plans.ranks),
        max_num_seqs=most_seqs(config),
    )


def warm_up_plans(config: EngineConfig, memory: MemoryPlan, *, num_tokens: int) -> list[StepPlan]:
    """Return plans that run before the engine is ready, so that no request waits for the compilation of a kernel.

    The plans are the largest prefill, a prefill of the most sequences, a decode step, and a step with both; the last
    one drops their sequences. They keep the engine's limits, and write to blocks that have no cache entry yet, so
    nothing has to be undone. `num_tokens`: most tokens of a step.
    """
    longest = min(num_tokens, memory.max_model_len)
    most = min(most_seqs(config), num_tokens)
    share = min(longest, num_tokens // most, max(1, memory.max_model_len - 1))
    blocks_each = -(-(share + 1) // config.block_size)
    ids = range(1, 1 + max(1, min(most, memory.kv.num_blocks // blocks_each)))
    tables = {i: list(range((i - 1) * blocks_each, i * blocks_each)) for i in ids}
    plans = [
        _prefill([_new(0, longest)], {0: list(range(-(-longest // config.block_size)))}),
        _prefill([_new(i, share) for i in ids], tables, dropped=[0]),
    ]
    if share < memory.max_model_len:
        decodes = [SeqStep(seq_id=i, start=share, num_tokens=1, sample=True) for i in ids]
        again = SeqStep(seq_id=ids[-1], start=0, num_tokens=share, sample=True)
        plans += [StepPlan(step_id=0, seqs=decodes), StepPlan(step_id=0, seqs=[*decodes[:-1], again])]
    return [*plans, StepPlan(step_id=0, dropped_seqs=list(ids))]


def _new(seq_id: int, num_tokens: int) -> NewSeq:
    return NewSeq(seq_id=seq_id, token_ids=[0] * num_tokens, num_prompt_tokens=num_tokens, params=_PARAMS)


def _prefill(new: list[NewSeq], tables: dict[int, list[int]], dropped: list[int] | None = None) -> StepPlan:
    steps = [
        SeqStep(seq_id=n.seq_id, start=0, num_tokens=len(n.token_ids), sample=True, block_ids=[tables[n.seq_id]])
        for n in new
    ]
    return StepPlan(step_id=0, new_seqs=new, seqs=steps, dropped_seqs=dropped or [])
