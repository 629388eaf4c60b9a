"""Loads the weights of models and adapters; makes a runner, with a KV cache, for a loaded model."""

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo_engine.devices.cuda_calls import is_out_of_memory
from octavo_engine.devices.device import Device
from octavo_engine.devices.memory import size
from octavo_engine.grammar.compiler import GrammarCompiler, Vocabulary
from octavo_engine.media.image_prompts import has_extra
from octavo_engine.media.processed_images import ProcessedImages
from octavo_engine.media.processor_settings import read_processor_settings
from octavo_engine.media.worker import MediaWorkers, WorkerStart
from octavo_engine.models.model import Model, module_of
from octavo_engine.models.registry import build_model
from octavo_engine.ops.rank_group import Group
from octavo_engine.ops.stages import Stages
from octavo_engine.runner.adapters import Adapters
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.runner.checkpoint import Checkpoint
from octavo_engine.runner.drafter import make_drafter
from octavo_engine.runner.engine_memory import EngineMemory
from octavo_engine.runner.graphed_model import LoadedModel
from octavo_engine.runner.image_encoder import ImageEncoder
from octavo_engine.runner.kv_cache_size import describe_lack_at_start
from octavo_engine.runner.memory_plan import MemoryPlan, num_media_workers
from octavo_engine.runner.runner import Runner
from octavo_engine.runner.weight_formats import kept_formats, log_activations, log_expanded, log_quantised
from octavo_engine.sampling.grammar_masks import GrammarMasks
from octavo_engine.settings.config import EngineConfig, adapters_in_memory, most_seqs, steps_ahead
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.fingerprint import weights_fingerprint
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import download_dir, resolve_text_files
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.weights.dummy import dummy_weights
from octavo_engine.weights.loader import (
    Progress,
    iter_weights,
    loading_bar,
    read_cache_scales,
    tower_weights,
)
from octavo_engine.wire.errors import OctavoError, StartupError, first_line

_LOGGER = logging.getLogger(__name__)


def check_nothing() -> None:
    """Do nothing: there are no other ranks to check."""


def load_adapters(config: EngineConfig, model: Model) -> tuple[Adapters | None, dict[str, str]]:
    """Read all configured adapters, and add as many as fit; return each adapter's hash by name. Raises StartupError."""
    if not config.enable_lora:
        return None, {}
    adapters = Adapters(model, max_rank=config.max_lora_rank, download_dir=download_dir(config))
    hashes: dict[str, str] = {}
    for module in config.lora_modules:
        prepared = adapters.prepare(module.path)
        if len({*hashes.values(), prepared.hash}) <= adapters_in_memory(config):
            adapters.add(prepared)
        hashes[module.name] = prepared.hash
    return adapters, hashes


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
    stages: Stages | None = None,
    *,
    check: Callable[[], None] = check_nothing,
) -> Model:
    """Load a model, or one rank's shard. `check`: called before each tensor and layer is loaded; it may raise an error
    to stop loading."""
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
        stages=stages,
    )
    if files.load_format == "dummy":
        model.load_weights(_checked(dummy_weights(model.named_shapes().items(), dtype=dtype), check))
    else:
        with nullcontext(progress) if progress is not None else loading_bar() as show:
            weights = iter_weights(
                files,
                dtype=dtype,
                blocks=model.in_files(model.block_tensors()),
                groups=model.in_files(model.group_tensors()),
                skipped=model.modules_elsewhere,
                progress=show,
            )
            model.load_weights(_checked(weights, check))
    if model.tower is not None:
        shapes = model.tower.named_shapes().items()
        is_dummy = files.load_format == "dummy"
        model.tower.load_weights(dict(dummy_weights(shapes, dtype=dtype)) if is_dummy else tower_weights(files))
    model.finish_loading(check)
    device.synchronize()
    return model


def _checked(weights: Iterable[tuple[str, Any]], check: Callable[[], None]) -> Iterator[tuple[str, Any]]:
    for each in weights:
        check()
        yield each
        del each  # before the next one is read


def load_checkpoint(
    device: Device,
    checkpoint: Checkpoint,
    plan: MemoryPlan,
    group: Group | None = None,
    config: EngineConfig | None = None,
    progress: Progress | None = None,
    check: Callable[[], None] = check_nothing,
    *,
    stages: Stages | None = None,
) -> LoadedModel:
    """Load a model that can be reloaded as long as its files hold the same weights. See `load_model`.

    `config`: None for a draft model, which takes no images.
    """
    quantization = None if config is None else config.quantization
    load = partial(load_model, device, checkpoint.files, checkpoint.config, plan, progress, group, stages, check=check)
    model, fingerprint = load(), weights_fingerprint(checkpoint.files, quantization)
    stored = {name: each for name, each in checkpoint.stored.items() if module_of(name) not in model.modules_elsewhere}
    kept = model.in_files(model.block_tensors() | model.group_tensors() | model.quantised_tensors())
    kept |= {name for name in stored if model.renamed(name) in kept}
    log_expanded(stored, kept, device, plan.dtype)
    log_activations(checkpoint.files.quantisation, model)
    log_quantised(model, plan.quantise_to)
    scales = {}
    if plan.kv_dtype == torch.float8_e4m3fn:
        scales = read_cache_scales(checkpoint.files)
        _LOGGER.info(
            "KV cache of %s in FP8 (e4m3): %d layers use the checkpoint's scales, all others a scale of 1",
            checkpoint.files.name,
            len(scales),
        )

    def reload() -> Model:
        if weights_fingerprint(checkpoint.files, quantization) != fingerprint:  # routers hold block hashes made with it
            root = checkpoint.files.root
            raise StartupError(f"{root}: the weights have changed since the start: restart the engine to load them.")
        return load()

    images = None if config is None else load_images(config, device, checkpoint.files, model)
    return LoadedModel(model, reload, fingerprint, images, scales)


def load_images(config: EngineConfig, device: Device, files: ModelFiles, model: Model) -> ImageEncoder | None:
    """Start the workers that decode images; return None if the model takes no images, or if the image processor's
    package or settings are missing: the model then serves text only.

    Raises StartupError.
    """
    if model.config.vision is None or not has_extra() or not read_processor_settings(files).image:
        return None
    start = WorkerStart(str(files.root), files.config, config.mm_processor_kwargs, config.max_image_pixels)
    workers = MediaWorkers(start, num_media_workers(config))
    processed = ProcessedImages(workers, int(config.mm_processor_cache_gb * (1 << 30)))
    return ImageEncoder(processed, model.config.vision.image_token_id, device)


def load_draft(
    device: Device, draft: Checkpoint, plan: MemoryPlan, progress: Progress | None, check: Callable[[], None]
) -> LoadedModel:
    """Load the draft model in the target model's dtype. `--quantization` does not apply to it."""
    plan = replace(plan, block_formats=kept_formats(draft.stored, device, plan.dtype), quantise_to=None)
    loaded = load_checkpoint(device, draft, plan, progress=progress, check=check)
    _LOGGER.info("draft model: %s, %s of weights", draft.files.name, size(loaded.model.weights_bytes()))
    return loaded


def load_vocabulary(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> Vocabulary:
    """Load the vocabulary for grammars; it has an end token, as the front end rejects grammars for other models."""
    tokenizer = load_tokenizer(resolve_text_files(config, files))
    ends = [i for i in (tokenizer.eos_token_id, *model.eos_token_ids) if i is not None]
    return Vocabulary(tokenizer, vocab_size=model.vocab_size, eos_token_id=ends[0])


def make_runner(
    config: EngineConfig,
    device: Device,
    loaded: LoadedModel,
    plan: MemoryPlan,
    compiler: GrammarCompiler,
    adapters: Adapters | None = None,
    *,
    draft: LoadedModel | None = None,
) -> tuple[Runner, EngineMemory]:
    """Allocate the KV cache and make the runner of a loaded model."""
    model = loaded.model
    backend = device.attention_backend(loaded.kv_specs(), config.block_size, plan.kv_dtype)
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
        *(plan.kv.num_blocks, config.block_size, num_host_blocks),
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
        stages=model.build.stages,
        images=loaded.images,
    )
    memory = EngineMemory(
        runner,
        backend,
        device,
        num_blocks=plan.kv.num_blocks,
        load_model=loaded.reload if adapters is None else partial(adapters.reload, loaded.reload),
        make_host=make_host,
        drafter=drafter,
    )
    return runner, memory
