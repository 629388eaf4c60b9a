"""Finds the files of the served model and of the draft model, and checks that the draft model suits the served one."""

from dataclasses import dataclass, replace

from octavo_engine.devices.device import Device
from octavo_engine.media.placeholders import make_image_tokens, most_tokens
from octavo_engine.media.processor_settings import read_processor_settings
from octavo_engine.models.registry import complete_config
from octavo_engine.runner.weight_formats import StoredTensors
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import context_length, load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.pooling import load_served_model
from octavo_engine.sources.resolve import resolve_files, resolve_text_files
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.weights.loader import stored_tensors
from octavo_engine.wire.errors import StartupError

#: Text that tokenizers with different vocabularies split into different tokens.
_SAMPLE = "Drafts quote: def area(width, height):\n    return 12.5 * width  # größer, 東京 🙂\n"
_OTHER = "use a draft model of the target's family"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """`stored`: the tensors of a quantised checkpoint, which may stay in blocks."""

    files: ModelFiles
    config: ModelConfig
    stored: StoredTensors


def read_checkpoint(config: EngineConfig, files: ModelFiles) -> Checkpoint:
    model_config = complete_config(load_served_model(config, files), config.model_impl)
    _check_vision(config, model_config)
    if (vision := model_config.vision) is not None:
        settings = read_processor_settings(files, config.mm_processor_kwargs).image
        most = most_tokens(make_image_tokens(vision.family, vision.hf, settings, "")) if settings else 0
        model_config = replace(model_config, vision=replace(vision, most_tokens=most))
    return Checkpoint(files=files, config=model_config, stored=stored_tensors(files))


def _check_vision(config: EngineConfig, model: ModelConfig) -> None:
    """Raise StartupError for settings with which a model with a tower does not run yet."""
    speculation = config.speculative_config
    refused = {
        "--tensor-parallel-size": config.tensor_parallel_size > 1,
        "--pipeline-parallel-size": config.pipeline_parallel_size > 1,
        "--enable-lora": config.enable_lora,
        "--runner pooling": model.pooling is not None,
        "--model-impl transformers": config.model_impl == "transformers",
        "a draft model in --speculative-config": speculation is not None and speculation.model is not None,
    }
    setting = next((name for name, is_set in refused.items() if is_set), None)
    if model.vision is not None and setting is not None:
        raise StartupError(f"{model.name}: {setting} is not supported yet for a model that takes images: omit it.")


def find_draft(config: EngineConfig, device: Device, target: Checkpoint) -> Checkpoint | None:
    """Find the files of the draft model, if one is set. Raises StartupError if it does not suit the target model."""
    speculation = config.speculative_config
    if speculation is None or speculation.model is None:
        return None
    if device.name != "cpu":
        raise StartupError(
            f"speculative_config.model={speculation.model!r}: draft models run on a CPU only, and this engine computes "
            f"on {device.name}: set --device cpu, or method='ngram'."
        )
    draft_files = resolve_files(
        replace(
            config,
            model=speculation.model,
            revision=speculation.revision,
            quantization=None,
            hf_overrides={},
            load_format="dummy" if config.load_format == "dummy" else "auto",
        )
    )
    draft_config = complete_config(load_model_config(draft_files), config.model_impl)
    if draft_config.vision is not None:
        raise StartupError(
            f"speculative_config.model={speculation.model!r} takes images, which is not supported yet for a draft "
            "model: use a model that takes only text."
        )
    draft = Checkpoint(files=draft_files, config=draft_config, stored=stored_tensors(draft_files))
    _check_length(config, draft, target.config)
    _check_vocabulary(config, draft, target)
    return draft


def _check_length(config: EngineConfig, draft: Checkpoint, target: ModelConfig) -> None:
    wanted, longest = config.max_model_len or context_length(target), context_length(draft.config)
    if longest < wanted:
        raise StartupError(
            f"speculative_config.model={draft.files.name!r} has a context of {longest} tokens, but requests may have "
            f"{wanted}: set --max-model-len to at most {longest}, or use a draft model with a longer context."
        )


def _check_vocabulary(config: EngineConfig, draft: Checkpoint, target: Checkpoint) -> None:
    sizes = draft.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise StartupError(
            f"speculative_config.model={draft.files.name!r} has a vocabulary of {sizes[0]} tokens, but the target "
            f"model has {sizes[1]}: {_OTHER}, with an equal vocab_size."
        )
    samples = _sample(resolve_text_files(config, target.files)), _sample(draft.files)
    if None not in samples and samples[0] != samples[1]:
        raise StartupError(
            f"speculative_config.model={draft.files.name!r} does not have the vocabulary of the target model: "
            f"their tokenizers split a sample text differently: {_OTHER}."
        )


def _sample(files: ModelFiles) -> list[int] | None:
    """Return the tokens of the sample text; None without a tokenizer: nothing is compared then."""
    try:
        return load_tokenizer(files).encode(_SAMPLE, add_special_tokens=False)
    except StartupError:
        return None
