"""Reads the value of `speculative_config`, vLLM's name for the settings of speculative decoding."""

from collections.abc import Mapping
from typing import Any

from octavo_engine.settings.declare import as_mapping
from octavo_engine.settings.records import SpeculativeConfig
from octavo_engine.settings.vllm import SETTING, UnusedArgument, VllmArgument, find_unused
from octavo_engine.wire.errors import StartupError

MAX_DRAFT_TOKENS = 32
_NGRAM = ("ngram", "[ngram]")
_FIELDS = {
    "ngram": ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("method", "model", "num_speculative_tokens", "revision", "draft_tensor_parallel_size"),
}
#: Further fields of vLLM: they have no effect here, or only the value is accepted that has no effect in vLLM either.
_VLLM_FIELDS = {
    **dict.fromkeys(("enforce_eager", "disable_padded_drafter_batch", "use_local_argmax_reduction"), SETTING),
    **dict.fromkeys(("max_model_len", "code_revision", "disable_by_batch_size", "draft_sample_method"), SETTING),
    **dict.fromkeys(("attention_backend", "moe_backend", "disable_eagle_block_drop"), SETTING),
    "parallel_drafting": VllmArgument(fulfilled=(False,), missing="drafts are made one after another."),
    "use_heterogeneous_vocab": VllmArgument(fulfilled=(False,), missing="a draft model has the target's vocabulary."),
    "rejection_sample_method": VllmArgument(fulfilled=("standard",), missing="outputs don't depend on drafts."),
    "kv_cache_dtype": VllmArgument(fulfilled=("auto",), missing="a draft model's KV cache has the target's type."),
    "quantization": VllmArgument(missing="a draft model keeps the type of its checkpoint."),
}
#: vLLM's short arguments -> the fields that they set.
_SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
_REMEDY = (
    "set method='ngram', which takes drafts from the sequence itself, or model to the name or path of a draft model, "
    "or leave speculative_config out."
)


def speculative_config(value: Any) -> SpeculativeConfig | None:
    """Read the settings from JSON text or a mapping; None: no drafts. Raises StartupError."""
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    given = as_mapping("speculative_config", value)
    method = _method(given)
    unused_fields(given)
    unknown = sorted(given.keys() - _VLLM_FIELDS.keys() - set(_FIELDS[method]))
    if unknown:
        raise StartupError(
            f"speculative_config has no field {unknown[0]!r} for method {method!r}: leave it out, or use one of "
            f"{', '.join(_FIELDS[method])}."
        )
    if given.get("num_speculative_tokens") is None:
        raise StartupError(
            f"speculative_config needs num_speculative_tokens: set it to a number between 1 and {MAX_DRAFT_TOKENS}."
        )
    num_tokens = _count("num_speculative_tokens", given["num_speculative_tokens"], most=MAX_DRAFT_TOKENS)
    return _ngram(given, num_tokens) if method == "ngram" else _draft_model(given, num_tokens)


def unused_fields(value: Any) -> list[UnusedArgument]:
    """Return vLLM's fields that are accepted without effect. Raises StartupError for a refused value."""
    given = {} if value is None or isinstance(value, SpeculativeConfig) else as_mapping("speculative_config", value)
    table = {f"speculative_config.{name}": argument for name, argument in _VLLM_FIELDS.items()}
    named = {f"speculative_config.{name}": given[name] for name in given if name in _VLLM_FIELDS}
    return list(find_unused(table, named))


def speculation_setting(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `speculative_config` with the fields that vLLM's short arguments set. Raises StartupError."""
    short = {key: arguments[name] for name, key in _SHORT.items() if arguments.get(name) is not None}
    given = arguments.get("speculative_config")
    if not short:
        return {}
    if isinstance(given, SpeculativeConfig):
        given = {name: getattr(given, name, None) for name in _FIELDS[given.method]}
    whole = as_mapping("speculative_config", {} if given is None else given)
    for name, key in _SHORT.items():
        if key in short and whole.get(key) not in (None, short[key]):
            raise StartupError(
                f"{name}={short[key]!r} and speculative_config.{key}={whole[key]!r} contradict each other: omit one of "
                "them."
            )
    return {"speculative_config": {**whole, **short}}


def _ngram(given: Mapping[str, Any], num_tokens: int) -> SpeculativeConfig:
    least, most = (given.get(f"prompt_lookup_{name}") for name in ("min", "max"))
    defaults = SpeculativeConfig(num_speculative_tokens=num_tokens)
    # As in vLLM, if only one of minimum and maximum is given, the other gets the same value.
    most = _count("prompt_lookup_max", _first_given(most, least, defaults.prompt_lookup_max))
    least = _count("prompt_lookup_min", _first_given(least, most))
    if least > most:
        raise StartupError(
            f"speculative_config.prompt_lookup_min={least} is above prompt_lookup_max={most}: lower the former or "
            f"raise the latter."
        )
    return SpeculativeConfig(num_speculative_tokens=num_tokens, prompt_lookup_max=most, prompt_lookup_min=least)


def _draft_model(given: Mapping[str, Any], num_tokens: int) -> SpeculativeConfig:
    for name in ("model", "revision"):
        if not isinstance(given.get(name), str | None):
            raise StartupError(f"speculative_config.{name} must be text, got {given[name]!r}.")
    if not given.get("model"):
        raise StartupError(
            "speculative_config.method='draft_model' needs a model: set it to the name or path of a draft model."
        )
    size = given.get("draft_tensor_parallel_size")
    if size not in (None, 1):
        raise StartupError(
            f"speculative_config.draft_tensor_parallel_size must be 1, got {size!r}: leave it out, as a draft model "
            "is not divided."
        )
    return SpeculativeConfig(
        num_speculative_tokens=num_tokens, method="draft_model", model=given["model"], revision=given.get("revision")
    )


def _method(given: Mapping[str, Any]) -> str:
    """Return the method, which a model implies, as in vLLM."""
    method, model = given.get("method"), given.get("model")
    if method is None and model is None:
        raise StartupError(f"speculative_config={dict(given)!r} names no method: {_REMEDY}")
    chosen = method if method is not None else "ngram" if model in _NGRAM else "draft_model"
    if chosen not in (*_NGRAM, "draft_model"):
        raise StartupError(f"speculative_config.method={method!r} is not supported by this version: {_REMEDY}")
    if chosen == "draft_model":
        return "draft_model"
    if model not in (None, *_NGRAM):
        raise StartupError(
            f"speculative_config.model={model!r} has no effect with method={method!r}: leave one of the two out."
        )
    return "ngram"


def _first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _count(name: str, value: Any, *, most: float = float("inf")) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
        return value
    bound = "at least 1" if most == float("inf") else f"between 1 and {most}"
    raise StartupError(f"speculative_config.{name} must be a whole number of {bound}, got {value!r}.")
