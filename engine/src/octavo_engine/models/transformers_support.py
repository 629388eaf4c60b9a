"""Finds an architecture in transformers; refuses those that the paged KV cache cannot serve, with reason and remedy."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import transformers
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo_engine.ops.attention import AttentionSpec
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import ConfigNumbers
from octavo_engine.wire.errors import StartupError, first_line

_LAYERS = "num_hidden_layers"
_MOST_MODULES = 2**18
_REQUIRED = ("vocab_size", "hidden_size", _LAYERS, "num_attention_heads", "max_position_embeddings")
_OF_QUANTISATION = ("quantization_config", "compression_config")  # weights are expanded before transformers gets them
_LAYER_TYPES = ("full_attention", "sliding_attention")


def find_family(config: ModelConfig) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the model's class and its config. Raises StartupError."""
    if config.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        where = f"transformers {transformers.__version__} has no decoder of this name"
        if "auto_map" in config.hf:
            where += ", and code from checkpoints (auto_map) is never run"
        raise refusal(config.architecture, where)
    family: type[PreTrainedModel] = getattr(transformers, config.architecture)
    assert family.config_class is not None
    names = {_LAYERS, family.config_class.attribute_map.get(_LAYERS, _LAYERS)}
    for name in names & config.hf.keys():  # many classes make lists of this length
        ConfigNumbers(config.name, {_LAYERS: config.hf[name]}).optional((_LAYERS,), 1)
    try:
        family_config = family.config_class.from_dict(
            {key: value for key, value in config.hf.items() if key not in _OF_QUANTISATION}
        )
    except Exception as error:
        raise refusal(config.architecture, f"transformers rejects config.json: {first_line(error)}") from error
    problem = _problem_of_family(family, family_config)
    if problem is not None:
        raise refusal(config.architecture, f"it {problem}")
    return family, family_config


def with_dimensions(config: ModelConfig) -> ModelConfig:
    """Return the config with the dimensions of transformers' config object, which knows a family's names of keys.

    Raises StartupError.
    """
    _, family_config = find_family(config)
    try:
        values = {key: getattr(family_config, key, None) for key in (*_REQUIRED, "num_key_value_heads", "head_dim")}
    except Exception as error:  # a value may differ between layers
        raise refusal(config.architecture, first_line(error)) from error
    missing = [key for key in _REQUIRED if values[key] is None]
    if missing or values["vocab_size"] != config.hf.get("vocab_size"):
        missing = missing or ["vocab_size"]
        raise refusal(config.architecture, f"its config.json states no {' and no '.join(missing)}")
    numbers = ConfigNumbers(config.name, values)
    vocab_size, hidden_size, num_layers, num_heads, length = (numbers.required((key,)) for key in _REQUIRED)
    return replace(
        config,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=numbers.optional(("num_key_value_heads",), num_heads),
        head_dim=numbers.optional(("head_dim",), max(1, hidden_size // num_heads)),
        max_position_embeddings=length,
    )


def check_specs(architecture: str, config: PreTrainedConfig, specs: list[AttentionSpec], max_model_len: int) -> None:
    """Compare the recorded attention with the config. Raises StartupError."""
    if len(specs) != config.num_hidden_layers:
        raise refusal(architecture, f"{len(specs)} of its {config.num_hidden_layers} layers have attention")
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is None or window >= max_model_len:
        return
    for spec in specs:
        slides = types is None or types[spec.layer_idx] == "sliding_attention"
        if slides and spec.kv.window is None:
            raise refusal(architecture, f"it does not pass the sliding_window of {window} on to its attention")


def refusal(architecture: str, reason: str) -> StartupError:
    return StartupError(
        f"architecture '{architecture}' is not supported: {reason}: use a model of another architecture; "
        "docs/guide/models.md lists tested ones."
    )


@contextmanager
def bounded_modules() -> Iterator[None]:
    """Raise ValueError once a model has too many modules, whichever number of its config is wrong."""
    count = itertools.count()

    def check(*_: Any) -> None:
        if next(count) == _MOST_MODULES:
            raise ValueError(f"its config.json asks for more than {_MOST_MODULES} modules")

    handle = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _problem_of_family(family: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    if "text_config" in config.sub_configs or config.is_encoder_decoder:
        return "is more than a decoder of text"
    if not family._supports_attention_backend:
        return "does not allow other attention (_supports_attention_backend)"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if others:
        return f"has layers of type {', '.join(others)}, but only {' and '.join(_LAYER_TYPES)} are built"
    return "keeps a state besides keys and values" if family._is_stateful else None
