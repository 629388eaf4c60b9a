"""Assembles an engine core: loads the executor, sizes the scheduler from the executor's `ReadyInfo`, opens the trace.

A *loader* creates the executor: `(config) -> (executor, ready info)`. It is given as "module:function" so that its name
can be sent to another process. This module imports no torch; the loader may.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.devices.memory import keep_freed_memory
from octavo_engine.devices.torch_env import bound_shape_caches, limit_openmp_spin
from octavo_engine.loop.engine_core import EngineCore, Proposer
from octavo_engine.loop.loaded_adapters import AdapterSource
from octavo_engine.loop.proposers import DraftModelProposer
from octavo_engine.loop.trace_file import TraceFile
from octavo_engine.settings.config import EngineConfig, adapters_in_memory, batched_tokens, steps_ahead
from octavo_engine.settings.records import ReadyInfo, SchedulerConfig
from octavo_engine.wire.errors import StartupError

if TYPE_CHECKING:
    from octavo_engine.runner.capacity import Capacity
    from octavo_engine.runner.executor import Executor

_LOGGER = logging.getLogger(__name__)

Loader = Callable[[EngineConfig], tuple["Executor", ReadyInfo]]

#: Streams then receive at least five tokens per second beside a long prompt, about the speed of reading.
CPU_MAX_STEP_MS = 200.0


def find_loader(name: str) -> Loader:
    """Import the loader. Raises StartupError if a package that it needs, such as torch, is not installed."""
    loader: Loader = import_compute(name)
    return loader


def find_capacity(config: EngineConfig) -> "Capacity":
    """Compute the engine's capacity without loading weights. Raises StartupError where a start would raise it."""
    capacity: Capacity = import_compute("octavo_engine.runner.capacity:plan_capacity")(config)
    return capacity


def import_compute(name: str) -> Any:
    """Import "module:function". Raises StartupError as `find_loader` does."""
    module, _, function = name.partition(":")
    limit_openmp_spin()
    bound_shape_caches()
    keep_freed_memory()
    try:
        return getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        hint = "pip install 'octavo-engine[torch]'"
        raise StartupError(f"the engine needs the Python package {error.name}: {hint}") from error


def start_core(config: EngineConfig, load: Loader) -> tuple[EngineCore, ReadyInfo]:
    """Load the executor and create the engine core around it. Raises StartupError."""
    trace = None if config.trace is None else TraceFile(Path(config.trace))
    executor, ready = load(config)
    limits = scheduler_config(config, ready)
    warn_if_steps_are_small(limits)
    publishing = {"kv_events": config.kv_stream, "kv_tokens": config.kv_events_config is not None}
    scheduler = (
        Scheduler(limits, **publishing) if trace is None else TracingScheduler(limits, trace.write, **publishing)
    )
    core = EngineCore(
        scheduler,
        executor,
        trace=trace,
        grammar_timeout_s=config.grammar_compile_timeout,
        proposer=_make_proposer(config),
        adapters=[
            (ready.adapters[module.name], AdapterSource(module.path, ready.adapter_folders[module.name]))
            for module in config.lora_modules
        ],
        max_cpu_loras=adapters_in_memory(config),
    )
    return core, ready


def _make_proposer(config: EngineConfig) -> Proposer | None:
    speculation = config.speculative_config
    if speculation is None:
        return None
    if speculation.method == "draft_model":
        return DraftModelProposer(speculation.num_speculative_tokens)
    # it needs numpy, which this module's other users don't import
    from octavo_engine.loop.proposers import NgramProposer

    return NgramProposer(speculation)


def warn_if_steps_are_small(config: SchedulerConfig) -> None:
    """Log a warning if more sequences may run than a step has tokens: each sequence needs at least one token."""
    if config.max_num_batched_tokens < config.max_num_seqs:
        _LOGGER.warning(
            "--max-num-batched-tokens %d lets at most as many sequences run in a step, fewer than --max-num-seqs %d: "
            "raise the former or lower the latter",
            *(config.max_num_batched_tokens, config.max_num_seqs),
        )


def choose_max_step_ms(config: EngineConfig, ready: ReadyInfo) -> float:
    """Return the user's limit, or the default: a limit on a CPU, where steps with long prompts would take seconds."""
    if config.max_step_ms is not None:
        return config.max_step_ms
    return CPU_MAX_STEP_MS if ready.device == "cpu" else 0.0


def scheduler_config(config: EngineConfig, ready: ReadyInfo) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=ready.max_model_len,
        num_blocks=ready.num_blocks,
        num_host_blocks=ready.num_host_blocks,
        block_size=ready.block_size,
        max_num_seqs=config.max_num_seqs or ready.max_num_seqs,
        max_num_batched_tokens=batched_tokens(config, ready.device),
        steps_ahead=steps_ahead(config, ready.device),
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_step_ms=choose_max_step_ms(config, ready),
        watermark=config.watermark,
        max_loras=config.max_loras if config.enable_lora else 0,
        preemption_mode=config.preemption_mode,
        block_lives_every=round(1 / config.kv_cache_metrics_sample) if config.kv_cache_metrics else 0,
        hash_root=ready.hash_root,
        debug_invariants=config.debug_invariants,
    )
