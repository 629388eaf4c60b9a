"""Finds out whether a model answers with vectors, and how it pools them: from its files and the user's settings.

`modules.json` and `1_Pooling/config.json` are files of sentence-transformers. Without them, the last token's row is the
vector, and is normalised, as decoders trained for embeddings need it. Other poolings, and dense layers after a pooling,
raise StartupError, because the engine cannot compute them: its vectors would differ from the model's.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ModelConfig, ModelPooling, PoolingType
from octavo_engine.sources.json_file import read_json_object
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.errors import StartupError

MODULES = "modules.json"
#: Endings of the keys `pooling_mode_…` in `1_Pooling/config.json` -> vLLM's names.
_MODES = {
    "lasttoken": "LAST",
    "cls_token": "CLS",
    "mean_tokens": "MEAN",
    "max_tokens": "MAX",
    "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
    "weightedmean_tokens": "WEIGHTED_MEAN",
}
_SUPPORTED = get_args(PoolingType)
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
#: Keys of `config.json` with the values that make a decoder attend to later tokens.
_BIDIRECTIONAL = {"is_causal": False, "use_bidirectional_attention": True}


def load_served_model(config: EngineConfig, files: ModelFiles) -> ModelConfig:
    """Build the model's config with `pooling`, as the model's files and the user's settings have it.

    Raises StartupError.
    """
    model = load_model_config(files)
    if not is_pooling(config, files, model.architecture):
        if config.pooler_config:
            raise StartupError("--pooler-config is a setting of embedding models: add --runner pooling, or omit it.")
        return model
    for key, value in _BIDIRECTIONAL.items():
        if model.hf.get(key) is value:
            raise StartupError(
                f"{files.name}: {key} in config.json is {json.dumps(value)}: its tokens attend to later ones, and the "
                "engine computes causal attention, which gives other vectors: use a causal embedding model."
            )
    if config.speculative_config is not None:
        raise StartupError("--speculative-config: an embedding model generates no tokens to draft: omit it.")
    if config.enable_lora:
        raise StartupError(
            "--enable-lora: adapters of embedding models are not supported: omit it, or merge the adapter into the "
            "checkpoint."
        )
    return replace(model, pooling=_model_pooling(config, files, model))


def is_pooling(config: EngineConfig, files: ModelFiles, architecture: str) -> bool:
    """Return whether the model returns vectors: as the user sets it, or if it has a pooling or no logits head."""
    if config.runner != "auto":
        return config.runner == "pooling"
    has_head = not architecture.endswith("Model") or architecture.endswith("LMHeadModel")
    return _modules(files) is not None or not has_head


def _model_pooling(config: EngineConfig, files: ModelFiles, model: ModelConfig) -> ModelPooling:
    kind, normalize = _stored_pooling(files)
    if config.pooler_config is not None:
        kind = config.pooler_config.pooling_type or kind
        chosen = config.pooler_config.use_activation
        normalize = normalize if chosen is None else chosen
    if kind not in _SUPPORTED:
        raise StartupError(
            f"{files.name}: pooling {kind} is not supported by this version, only {', '.join(_SUPPORTED)}: use a model "
            'that pools so, or choose one by --pooler-config \'{"pooling_type": "LAST"}\'.'
        )
    sizes = model.hf.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(type(size) is int and 1 <= size <= model.hidden_size for size in sizes):
        raise StartupError(
            f"{files.name}: matryoshka_dimensions={sizes!r} must be a list of numbers from 1 to {model.hidden_size}."
        )
    return ModelPooling(
        kind=cast(PoolingType, kind),
        normalize=normalize,
        is_matryoshka=bool(model.hf.get("is_matryoshka") or sizes),
        matryoshka_dimensions=tuple(sizes),
    )


def _stored_pooling(files: ModelFiles) -> tuple[str, bool]:
    """Return the pooling and whether it normalises, from the model's files or by default."""
    modules = _modules(files)
    if modules is None:
        return "LAST", True
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _KNOWN_MODULES]:
        raise StartupError(
            f"{files.name}: {MODULES} has a module {unknown[0]}, but only {', '.join(_KNOWN_MODULES)} are supported: "
            "use another embedding model."
        )
    poolings = [str(module.get("path")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    kind = _pooling_mode(files.root / poolings[0] / "config.json") if poolings else "LAST"
    return kind, "Normalize" in kinds


def _pooling_mode(path: Path) -> str:
    stored = read_json_object(path)
    chosen = [name for mode, name in _MODES.items() if stored.get(f"pooling_mode_{mode}")]
    if isinstance(named := stored.get("pooling_mode"), str):  # since sentence-transformers 5
        chosen = [_MODES.get(named, _MODES.get(f"{named}_tokens", _MODES.get(f"{named}_token", named)))]
    if chosen == ["MEAN"] and stored.get("include_prompt") is False:
        raise StartupError(
            f"{path}: include_prompt is false: the mean leaves out the tokens of an instruction, which the engine does "
            "not know: use another embedding model."
        )
    if len(chosen) != 1:
        raise StartupError(
            f"{path}: chooses {len(chosen)} poolings ({', '.join(chosen) or 'none'}), but one is supported: set "
            '--pooler-config \'{"pooling_type": "LAST"}\' to choose it.'
        )
    return chosen[0]


def _modules(files: ModelFiles) -> list[dict[str, Any]] | None:
    """Return the modules of a sentence-transformers model, None for another model. A GGUF file is a whole model."""
    path = files.root / MODULES
    if files.gguf is not None or not path.is_file():
        return None
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise StartupError(f"{path}: must hold a list of modules.")
    return modules
