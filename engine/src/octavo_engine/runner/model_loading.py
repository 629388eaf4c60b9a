"""Loads a model: from an `EngineConfig` to an executor with weights and KV cache, ready for its first plan."""

import logging
import time
from dataclasses import dataclass

import torch

from octavo_engine.config import EngineConfig, ModelConfig, ReadyInfo
from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.grammar.library import Vocabulary
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.runner.batch import PersistentBatch
from octavo_engine.runner.device import Device, open_device
from octavo_engine.runner.executor import Executor, LocalExecutor
from octavo_engine.runner.grammar_masks import GrammarMasks
from octavo_engine.runner.memory import KVSize, size_kv
from octavo_engine.runner.memory_fit import fitting_dtype
from octavo_engine.runner.runner import Runner
from octavo_engine.sources.fingerprint import weights_fingerprint
from octavo_engine.sources.model_config import context_length, load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.weights.dummy import dummy_weights
from octavo_engine.weights.loader import Progress, iter_weights, loading_bar
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import root_hash

_LOGGER = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    model: Model
    dtype: torch.dtype
    max_model_len: int


def load_executor(config: EngineConfig, *, progress: Progress | None = None) -> tuple[Executor, ReadyInfo]:
    """Load the model and return its executor. Raises StartupError.

    `progress`: called with (bytes done, total bytes); by default, a progress bar is shown on a terminal.
    """
    started = time.perf_counter()
    device = open_device(config.device)
    device.prepare(config)
    files = resolve_model(config.model, revision=config.revision, load_format=config.load_format)
    loaded = load_model(config, device, files, load_model_config(files), progress)
    compiler = GrammarCompiler(lambda: load_vocabulary(config, files, loaded.model.config))
    runner, kv = make_runner(config, device, loaded, compiler)
    dtype = str(loaded.dtype).removeprefix("torch.")
    fingerprint = weights_fingerprint(files)
    info = ReadyInfo(
        max_model_len=loaded.max_model_len,
        num_blocks=kv.num_blocks,
        num_host_blocks=kv.num_host_blocks,
        block_size=config.block_size,
        dtype=dtype,
        kv_dtype=dtype,
        device=device.name,
        weights_fingerprint=fingerprint,
        hash_root=root_hash(fingerprint, dtype, config.block_size),
        weights_bytes=loaded.model.weights_bytes(),
        kv_bytes=kv.kv_bytes,
        load_s=time.perf_counter() - started,
    )
    return LocalExecutor(runner, compiler), info


def load_model(
    config: EngineConfig, device: Device, files: ModelFiles, model_config: ModelConfig, progress: Progress | None = None
) -> LoadedModel:
    max_model_len = choose_max_model_len(config, model_config)
    dtype = choose_dtype(config, device, model_config)
    model = build_model(model_config, dtype=dtype, device=device.torch_device, max_model_len=max_model_len)
    if files.load_format == "dummy":
        model.load_weights(dummy_weights(model.named_shapes().items(), dtype=dtype))
    elif progress is not None:
        model.load_weights(iter_weights(files, dtype=dtype, progress=progress))
    else:
        with loading_bar() as show:
            model.load_weights(iter_weights(files, dtype=dtype, progress=show))
    model.finish_loading()
    device.synchronize()
    return LoadedModel(model=model, dtype=dtype, max_model_len=max_model_len)


def choose_dtype(config: EngineConfig, device: Device, model: ModelConfig) -> torch.dtype:
    """Return the type of --dtype or, for auto, one that fits into memory. Raises as `choose_max_model_len` does."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    max_model_len = choose_max_model_len(config, model)
    return fitting_dtype(config, device, model, dtype=device.default_dtype(model), max_model_len=max_model_len)


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return --max-model-len or the model's context length. Raises StartupError for a longer or invalid length."""
    wanted, longest = config.max_model_len, context_length(model)
    if wanted is None:
        return longest
    if wanted < 1:
        raise StartupError(f"--max-model-len must be at least 1, got {wanted}.")
    if wanted > longest:
        raise StartupError(f"--max-model-len {wanted} exceeds the model's length of {longest}: use at most {longest}.")
    return wanted


def load_vocabulary(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> Vocabulary:
    """Load the vocabulary for grammars; it has an end token, as the front end rejects grammars for other models."""
    text_files = files if config.tokenizer is None else resolve_model(config.tokenizer)
    tokenizer = load_tokenizer(text_files)
    ends = [i for i in (tokenizer.eos_token_id, *model.eos_token_ids) if i is not None]
    return Vocabulary(tokenizer, vocab_size=model.vocab_size, eos_token_id=ends[0])


def make_runner(
    config: EngineConfig, device: Device, loaded: LoadedModel, compiler: GrammarCompiler
) -> tuple[Runner, KVSize]:
    backend = device.attention_backend(loaded.model.kv_specs(), config.block_size, loaded.dtype)
    memory = device.memory()
    kv = size_kv(
        config,
        max_model_len=loaded.max_model_len,
        bytes_per_block=backend.bytes_per_block(),
        memory=memory,
        default_kv_bytes=device.default_kv_bytes(memory, config),
    )
    backend.allocate(kv.num_blocks)
    batch = PersistentBatch(
        max_num_seqs=config.max_num_seqs,
        max_model_len=loaded.max_model_len,
        block_size=config.block_size,
        vocab_size=loaded.model.config.vocab_size,
        device=device.torch_device,
    )
    host = device.host_blocks(kv.num_host_blocks, backend.bytes_per_block()) if kv.num_host_blocks else None
    _LOGGER.info(
        "KV cache: %d blocks of %d tokens; %d blocks in host memory",
        kv.num_blocks,
        config.block_size,
        kv.num_host_blocks,
    )
    grammars = GrammarMasks(compiler, vocab_size=batch.vocab_size)
    return Runner(loaded.model, backend, batch, grammars, host=host, logprobs_mode=config.logprobs_mode), kv
