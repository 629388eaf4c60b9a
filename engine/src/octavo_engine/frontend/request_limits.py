"""Limits on a request's length, token ids and log-probabilities, and defaults of its parameters. Each error states the
limit and the value.
"""

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ModelConfig, ModelPooling
from octavo_engine.sources.json_file import read_json_object
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo_engine.wire.pooling import PoolingParams
from octavo_engine.wire.sampling import SamplingParams

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling_params(config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """Read defaults for unset fields: generation_config.json, then the values of --override-generation-config."""
    generation = {**_generation_config(config.generation_config, model), **config.override_generation_config}
    defaults = {name: generation[name] for name in _SAMPLING_DEFAULTS if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation["max_new_tokens"]
    try:
        SamplingParams(**defaults)
    except (InvalidRequest, TypeError) as error:
        raise StartupError(
            f"generation_config.json or --override-generation-config: {error} Pass --generation-config vllm to ignore "
            "the defaults of the file."
        ) from error
    return defaults


def _generation_config(source: str, model: ModelConfig) -> dict[str, Any]:
    """Return the model's generation_config.json ("auto"), nothing ("vllm"), or the file of a folder."""
    if source == "vllm":
        return {}
    return model.generation if source == "auto" else read_json_object(Path(source) / "generation_config.json")


def max_output_tokens(config: EngineConfig, defaults: Mapping[str, Any]) -> int | None:
    """Most tokens that a server generates for a request, as in vLLM: `max_new_tokens` of --override-generation-config,
    or of the folder of --generation-config. That of the model's own file is a default only."""
    if config.generation_config in ("auto", "vllm"):
        limit: int | None = config.override_generation_config.get("max_new_tokens")
        return limit
    return defaults.get("max_tokens")


def fit_to_context(
    params: SamplingParams,
    num_prompt_tokens: int,
    max_model_len: int,
    *,
    clamp: bool,
    max_output_tokens: int | None = None,
) -> SamplingParams:
    """Return a shallow copy whose `max_tokens` is an int that fits after the prompt; None becomes all the remaining
    context. `max_output_tokens`: most tokens of any output.
    """
    room = max_model_len - num_prompt_tokens
    asked = params.max_tokens
    if room < 1 or (asked is not None and asked > room and not clamp):
        raise ContextLengthExceeded(max_model_len=max_model_len, num_requested=asked or 1, num_input=num_prompt_tokens)
    fitted = copy.copy(params)
    fitted.max_tokens = min(limit for limit in (room, asked, max_output_tokens) if limit is not None)
    fitted.min_tokens = min(params.min_tokens, fitted.max_tokens)
    return fitted


def check_length(num_prompt_tokens: int, max_model_len: int) -> None:
    """Check the prompt of a request without output."""
    if num_prompt_tokens > max_model_len:
        raise ContextLengthExceeded(max_model_len=max_model_len, num_requested=0, num_input=num_prompt_tokens)


def resolve_pooling(params: PoolingParams, model: ModelPooling, size: int) -> PoolingParams:
    """Check `dimensions` and set the parameters that are left out. `size`: the dimensions of the model's vectors."""
    asked, cuts = params.dimensions, model.matryoshka_dimensions
    given = params.normalize if params.use_activation is None else params.use_activation
    normalize = model.normalize if given is None else given
    if asked is not None and asked != size:
        if not model.is_matryoshka:
            raise InvalidRequest(
                f"dimensions={asked}: the model's vectors have {size} dimensions and can't be cut, as its config.json "
                "has no is_matryoshka: omit dimensions.",
                param="dimensions",
            )
        if asked > size or (cuts and asked not in cuts):
            choices = ", ".join(map(str, cuts)) if cuts else f"1 to {size}"
            raise InvalidRequest(f"dimensions={asked}: this model supports {choices}.", param="dimensions")
    return PoolingParams(dimensions=asked, normalize=normalize)


def check_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids:
        return
    if not all(type(token_id) is int for token_id in token_ids):
        raise InvalidRequest(f"{param} must hold integer token ids.", param=param)
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} holds token id {token_id}, which is not in the vocabulary of {vocab_size} tokens.",
                param=param,
            )


def check_logprobs(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """Raise InvalidRequest if a request wants more than `max_logprobs`; in both, -1 means the whole vocabulary."""
    limit = vocab_size if max_logprobs == -1 else max_logprobs
    for param in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, param)
        if asked is not None and (vocab_size if asked == -1 else asked) > limit:
            raise InvalidRequest(
                f"Requested {param} of {asked}, which is greater than the maximum of {limit}: "
                f"ask for fewer or raise --max-logprobs.",
                param=param,
            )
