"""Loads a model: from an `EngineConfig` to an executor with weights and KV cache, ready for its first plan."""

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo_engine.devices.cuda_device import is_out_of_memory
from octavo_engine.devices.device import Device, open_device
from octavo_engine.devices.memory import size
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.grammar.library import Vocabulary
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model, complete_config
from octavo_engine.ops.rank_group import Group
from octavo_engine.runner.adapters import Adapters
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.runner.draft_source import DraftSource, find_draft
from octavo_engine.runner.drafter import LoadedDraft, make_drafter
from octavo_engine.runner.engine_memory import EngineMemory
from octavo_engine.runner.executor import LocalExecutor
from octavo_engine.runner.kv_cache_size import describe_lack_at_start
from octavo_engine.runner.memory_plan import MemoryPlan, RankPlans, divide_threads, plan_ranks
from octavo_engine.runner.runner import Runner
from octavo_engine.runner.warm_up import warm_up_plans
from octavo_engine.runner.weight_formats import kept_formats, log_expanded, log_quantised
from octavo_engine.sampling.grammar_masks import GrammarMasks
from octavo_engine.settings.config import (
    EngineConfig,
    ModelConfig,
    Quantization,
    ReadyInfo,
    batched_tokens,
    most_seqs,
    steps_ahead,
)
from octavo_engine.sources.download_dir import fetched_revision
from octavo_engine.sources.fingerprint import weights_fingerprint
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.pooling import load_served_model
from octavo_engine.sources.resolve import download_dir, resolve_files, resolve_text_files, with_local_adapters
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.weights.dummy import dummy_weights
from octavo_engine.weights.loader import Progress, iter_weights, lazy_weights, loading_bar, stored_tensors
from octavo_engine.wire.errors import OctavoError, StartupError, first_line
from octavo_engine.wire.hashing import root_hash
from octavo_engine.wire.plan import StepPlan

_LOGGER = logging.getLogger(__name__)


def _ignore() -> None:
    """Do nothing: there are no other ranks to check."""


class OtherRanks(Protocol):
    """The ranks of a model other than rank 0. All functions raise StartupError if a rank cannot start."""

    def start(self, files: ModelFiles, plans: RankPlans, gpu: torch.device | None) -> Group:
        """Start loading them; return the group of all ranks. `gpu`: rank 0's `Device.group_gpu`."""
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


def load_executor(
    config: EngineConfig, *, progress: Progress | None = None, other_ranks: OtherRanks | None = None
) -> tuple[LocalExecutor, ReadyInfo]:
    """Load the model, or the part of rank 0, and return its executor. Raises StartupError.

    `progress`: called with (bytes done, total bytes); by default, a progress bar is shown on a terminal.
    """
    device, began_s = open_device(config.device), time.perf_counter()
    with as_failed_start(device):
        return _load(config, device, began_s, progress, other_ranks)


def _load(
    config: EngineConfig, device: Device, began_s: float, progress: Progress | None, other_ranks: OtherRanks | None
) -> tuple[LocalExecutor, ReadyInfo]:
    config = divide_threads(config, device)
    device.prepare(config)
    prepared_s = time.perf_counter()
    files, config = resolve_files(config), with_local_adapters(config)
    model_config = complete_config(load_served_model(config, files), config.model_impl)
    stored = stored_tensors(files)
    draft = find_draft(config, device, files, model_config)
    plans = plan_ranks(config, device, model_config, stored, draft)
    config, plan = plans.config, plans.ranks[0]
    group = Group() if other_ranks is None else other_ranks.start(files, plans, device.group_gpu)
    check = _ignore if other_ranks is None else other_ranks.check
    with as_startup_error(config, plan):
        model = load_model(device, files, model_config, plan, progress, group, check=check)
        drafting = None if draft is None else load_draft(device, draft, plan, progress, check)
    log_ranks(plans)
    log_expanded(stored, model.block_tensors() | model.quantised_tensors(), device, plan.dtype)
    log_quantised(model, plan.quantise_to)
    compiler = GrammarCompiler(lambda: load_vocabulary(config, files, model_config))
    fingerprint = weights_fingerprint(files, config.quantization)

    adapters = make_adapters(config, model) if config.enable_lora else None

    def reload_model() -> Model:
        check_unchanged(files, fingerprint, config.quantization)
        return load_model(device, files, model_config, plan, group=group)

    with as_startup_error(config, plan):
        loaded = {} if adapters is None else {m.name: adapters.load(m.path) for m in config.lora_modules}
    loaded_s = time.perf_counter()
    with as_startup_error(config, plan):
        runner, memory = make_runner(
            config, device, model, plan, compiler, adapters, reload_model=reload_model, draft=drafting
        )
        other_weights_bytes = 0 if other_ranks is None else other_ranks.wait_ready()
        if device.compiles_late:
            warming = warm_up_plans(config, plan, num_tokens=batched_tokens(config, device.name))
            if other_ranks is not None:
                other_ranks.run(warming)
            runner.warm_up(warming)
    ready_s = time.perf_counter()
    own_weights_bytes = model.weights_bytes() + (0 if drafting is None else drafting.model.weights_bytes())
    info = replace(
        describe_plans(plans, device, fingerprint),
        weights_bytes=own_weights_bytes + other_weights_bytes,
        startup_s={"compile": prepared_s - began_s + ready_s - loaded_s, "weights": loaded_s - prepared_s},
        adapters=loaded,
        revision=fetched_revision(files.root),
    )
    return LocalExecutor(runner, compiler, memory, adapters), info


def describe_plans(plans: RankPlans, device: Device, fingerprint: str) -> ReadyInfo:
    """Return the facts that are known before the model is loaded."""
    config, plan = plans.config, plans.ranks[0]
    dtype = str(plan.dtype).removeprefix("torch.")
    return ReadyInfo(
        max_model_len=plan.max_model_len,
        num_blocks=plan.kv.num_blocks,
        num_host_blocks=plan.kv.num_host_blocks,
        block_size=config.block_size,
        dtype=dtype,
        kv_dtype=dtype,
        device=device.name,
        weights_fingerprint=fingerprint,
        hash_root=root_hash(fingerprint, dtype, config.block_size),
        weights_bytes=sum(each.model.weights_bytes for each in plans.ranks),
        kv_bytes=sum(each.kv.kv_bytes for each in plans.ranks),
        max_num_seqs=most_seqs(config),
    )


def log_ranks(plans: RankPlans) -> None:
    if len(plans.ranks) > 1:
        parts = [f"rank {i}: {size(p.model.weights_bytes)}, {size(p.kv.kv_bytes)}" for i, p in enumerate(plans.ranks)]
        totals = sum(p.model.weights_bytes for p in plans.ranks), sum(p.kv.kv_bytes for p in plans.ranks)
        _LOGGER.info("weights and KV cache: %s; all: %s, %s", "; ".join(parts), *map(size, totals))


def make_adapters(config: EngineConfig, model: Model) -> Adapters:
    folder = download_dir(config)
    return Adapters(model, max_loras=config.max_loras, max_rank=config.max_lora_rank, download_dir=folder)


def _with_adapters(load: Callable[[], Model], adapters: Adapters | None) -> Callable[[], Model]:
    """Return a function that loads a model again, and then its adapters."""

    def reload() -> Model:
        model = load()
        if adapters is not None:
            adapters.reload(model)
        return model

    return reload


@contextmanager
def as_startup_error(config: EngineConfig, plan: MemoryPlan) -> Iterator[None]:
    """Turn a lack of GPU memory into a StartupError that names a flag: the plan's reserve was too small."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(describe_lack_at_start(config, plan.memory), code="OutOfMemory") from error


@contextmanager
def as_failed_start(device: Device) -> Iterator[None]:
    """Turn any error of a start on a GPU, where kernels compile late, into a StartupError of one line with a remedy."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OctavoError) or not device.compiles_late:
            raise
        frames, cause = traceback.extract_tb(error.__traceback__), error
        place = next(frame for frame in reversed(frames) if "octavo_engine" in frame.filename)
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        named = getattr(cause, "error_message", None)  # of Triton, whose text begins with lines of the kernel
        raise StartupError(
            f"the start on the GPU failed ({type(error).__name__} at {Path(place.filename).name}:{place.lineno}): "
            f"{first_line(Exception(named) if named else cause).rstrip('.')}. Remedy: --device cpu, or a model of "
            "another architecture; report it with the model, the GPU and the version of torch."
        ) from error


def load_model(
    device: Device,
    files: ModelFiles,
    model_config: ModelConfig,
    plan: MemoryPlan,
    progress: Progress | None = None,
    group: Group | None = None,
    *,
    check: Callable[[], None] = _ignore,
) -> Model:
    """Load a model, or the part of it of one rank of `group`. `check`: called before each tensor and layer; an error
    that it raises ends the loading."""
    dtype = plan.dtype
    model = build_model(
        model_config,
        impl=plan.model_impl,
        dtype=dtype,
        device=device.torch_device,
        max_model_len=plan.max_model_len,
        block_formats=plan.block_formats,
        quantise_to=plan.quantise_to,
        group=group,
    )
    if files.load_format == "dummy":
        model.load_weights(_checked(dummy_weights(model.named_shapes().items(), dtype=dtype), check))
    else:
        with nullcontext(progress) if progress is not None else loading_bar() as show:
            weights = (
                lazy_weights(files, progress=show)
                if model.loads_lazily
                else iter_weights(files, dtype=dtype, blocks=model.block_tensors(), progress=show)
            )
            model.load_weights(_checked(weights, check))
    model.finish_loading(check)
    device.synchronize()
    return model


def _checked(weights: Iterable[tuple[str, Any]], check: Callable[[], None]) -> Iterator[tuple[str, Any]]:
    for each in weights:
        check()
        yield each


def load_draft(
    device: Device,
    draft: DraftSource,
    plan: MemoryPlan,
    progress: Progress | None = None,
    check: Callable[[], None] = _ignore,
) -> LoadedDraft:
    """Load the draft model, in the type of the target model. `--quantization` does not apply to it.

    `check`: see `load_model`.
    """
    plan = replace(plan, block_formats=kept_formats(draft.stored, device, plan.dtype), quantise_to=None)
    model = load_model(device, draft.files, draft.config, plan, progress, check=check)
    log_expanded(draft.stored, model.block_tensors(), device, plan.dtype)
    _LOGGER.info("draft model: %s, %s of weights", draft.files.name, size(model.weights_bytes()))
    fingerprint = weights_fingerprint(draft.files)

    def reload() -> Model:
        check_unchanged(draft.files, fingerprint)
        return load_model(device, draft.files, draft.config, plan)

    return LoadedDraft(model, reload)


def check_unchanged(files: ModelFiles, fingerprint: str, quantization: Quantization | None = None) -> None:
    """Raises StartupError if the files hold other weights: block hashes, which routers know, name the old ones."""
    if weights_fingerprint(files, quantization) != fingerprint:
        raise StartupError(f"{files.root}: the weights have changed since the start: restart the engine to load them.")


def load_vocabulary(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> Vocabulary:
    """Load the vocabulary for grammars; it has an end token, as the front end rejects grammars for other models."""
    tokenizer = load_tokenizer(resolve_text_files(config, files))
    ends = [i for i in (tokenizer.eos_token_id, *model.eos_token_ids) if i is not None]
    return Vocabulary(tokenizer, vocab_size=model.vocab_size, eos_token_id=ends[0])


def make_runner(
    config: EngineConfig,
    device: Device,
    model: Model,
    plan: MemoryPlan,
    compiler: GrammarCompiler,
    adapters: Adapters | None = None,
    *,
    reload_model: Callable[[], Model],
    draft: LoadedDraft | None = None,
) -> tuple[Runner, EngineMemory]:
    """Allocate the KV cache and make the runner. `reload_model` loads the weights that `EngineMemory` has released."""
    backend = device.attention_backend(model.kv_specs(), config.block_size, plan.dtype)
    backend.allocate(plan.kv.num_blocks)
    batch = PersistentBatch(
        max_num_seqs=most_seqs(config),
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
        vocab_size=model.config.vocab_size,
        device=device.torch_device,
        copy=device.input_copy(),
        starts_ahead=steps_ahead(config, device.name) > 0,
    )
    num_host_blocks = plan.kv.num_host_blocks

    def make_host() -> Tensor | None:
        return device.host_blocks(num_host_blocks, backend.bytes_per_block()) if num_host_blocks else None

    _LOGGER.info(
        "KV cache: %d blocks of %d tokens; %d blocks in host memory",
        plan.kv.num_blocks,
        config.block_size,
        num_host_blocks,
    )
    drafter = None if draft is None else make_drafter(config, device, draft, plan, batch)
    grammars = GrammarMasks(compiler, vocab_size=batch.vocab_size)
    runner = Runner(
        model,
        backend,
        batch,
        grammars,
        device,
        host=make_host(),
        adapters=adapters,
        logprobs_mode=config.logprobs_mode,
        enforce_eager=config.enforce_eager,
        drafter=drafter,
        pooling=None if model.config.pooling is None else model.config.pooling.kind,
        group=model.build.group,
    )
    memory = EngineMemory(
        runner,
        backend,
        device,
        num_blocks=plan.kv.num_blocks,
        load_model=_with_adapters(reload_model, adapters),
        make_host=make_host,
        drafter=drafter,
    )
    return runner, memory
