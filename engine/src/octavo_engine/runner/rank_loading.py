"""Loads the part of a model that a rank other than rank 0 computes."""

from datetime import timedelta
from pathlib import Path

from octavo_engine.devices.device import Device, open_device
from octavo_engine.devices.memory import MemoryInfo
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.models.model import Model
from octavo_engine.models.registry import complete_config
from octavo_engine.ops.rank_group import open_group
from octavo_engine.runner.executor import LocalExecutor
from octavo_engine.runner.memory_plan import plan_memory, with_blocks
from octavo_engine.runner.model_loading import (
    as_failed_start,
    as_startup_error,
    load_model,
    load_vocabulary,
    make_adapters,
    make_runner,
)
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.pooling import load_served_model
from octavo_engine.weights.loader import stored_tensors


def load_rank(
    config: EngineConfig,
    files: ModelFiles,
    memory: MemoryInfo,
    rank: int,
    meeting_file: Path,
    *,
    num_blocks: int,
    num_host_blocks: int,
) -> tuple[LocalExecutor, int]:
    """Load the part of a rank; return its executor and the bytes of its weights. `config`, `memory`: of `RankPlans`.

    Raises StartupError, and GroupBroken if another rank does not connect.
    """
    device = open_device(config.device, rank)
    with as_failed_start(device):
        return _load(config, device, files, memory, rank, meeting_file, (num_blocks, num_host_blocks))


def _load(
    config: EngineConfig,
    device: Device,
    files: ModelFiles,
    memory: MemoryInfo,
    rank: int,
    meeting_file: Path,
    blocks: tuple[int, int],
) -> tuple[LocalExecutor, int]:
    device.prepare(config)
    timeout = timedelta(seconds=config.distributed_timeout_seconds)
    group = open_group(meeting_file, rank, config.tensor_parallel_size, timeout, gpu=device.group_gpu)
    model_config = complete_config(load_served_model(config, files), config.model_impl)
    plan = plan_memory(config, device, model_config, stored_tensors(files), group=group, memory=memory)
    plan = with_blocks(plan, *blocks)

    def load_part() -> Model:
        return load_model(device, files, model_config, plan, lambda done, total: None, group)

    compiler = GrammarCompiler(lambda: load_vocabulary(config, files, model_config))  # plans for ranks have no grammars
    with as_startup_error(config, plan):
        model = load_part()
        adapters = make_adapters(config, model) if config.enable_lora else None
        if adapters is not None:
            for module in config.lora_modules:
                adapters.load(module.path)
        runner, engine_memory = make_runner(config, device, model, plan, compiler, adapters, reload_model=load_part)
    return LocalExecutor(runner, compiler, engine_memory, adapters), model.weights_bytes()
