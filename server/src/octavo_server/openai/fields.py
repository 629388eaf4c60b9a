"""Body fields that the generating endpoints share, and their conversion to `SamplingParams`.

Every field is optional and null means unset, since clients send null for fields they don't use. An unset field gets its
value from the model's generation_config.json, else from the defaults of `SamplingParams` (which are vLLM's). Unknown
fields are accepted, as in other OpenAI-compatible servers; `unsupported` rejects known fields that have no support.
"""

from collections.abc import Mapping
from typing import Any, Literal

from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import GREEDY_BELOW, INT32_MAX, SamplingParams
from pydantic import ConfigDict, Field

from octavo_server.openai.entries import Entries, ValidatedByEntry
from octavo_server.openai.structured import StructuredFields

#: Body fields that have the same name in `SamplingParams`.
_SAME_NAME = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p"),
    *("seed", "stop", "stop_token_ids", "bad_words", "ignore_eos", "min_tokens", "prompt_logprobs"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("logit_bias", "allowed_token_ids", "skip_reading_prefix_cache", "logprob_token_ids", "thinking_token_budget"),
)
MAX_REPORTED_KEYS = 10
#: Keys of generation_config.json whose values replace unset body fields.
GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class LenientModel(ValidatedByEntry):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(LenientModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class EngineFields(LenientModel):
    """Fields of every request that the engine runs."""

    model: str | None = Field(None, description="A served name; the first one if left out.")
    priority: int | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: str | None = None
    request_id: str | None = Field(None, max_length=256)
    user: str | None = None

    def check_salt(self) -> None:
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt must be a non-empty string, or left out.", param="cache_salt")


class SamplingFields(EngineFields):
    """Fields that every generating endpoint accepts, including the responses API."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, le=INT32_MAX)
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Entries[str] | None = None
    stop_token_ids: Entries[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None


class GenerationFields(StructuredFields, SamplingFields):
    n: int | None = None
    use_beam_search: bool | None = Field(
        None,
        description="Return the n most likely outputs, found as n beams. Of the sampling fields, only temperature and "
        "ignore_eos count.",
    )
    length_penalty: float | None = Field(
        None, allow_inf_nan=False, description="Exponent of a beam's length in its score. Default: 1."
    )
    bad_words: Entries[str] | None = None
    max_tokens: int | None = None
    allowed_token_ids: Entries[int] | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Entries[int] | None = Field(
        None, description="Tokens whose log-probabilities are sent instead of the most likely tokens'."
    )
    thinking_token_budget: int | None = Field(
        None, ge=-1, le=INT32_MAX, description="Most tokens of reasoning; -1: no limit."
    )
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Tokens to keep; -1: all that fit before one output token."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Left, the default, keeps the last tokens."
    )
    stream_interval: int | None = Field(
        None, ge=1, le=INT32_MAX, description="Tokens per chunk of a stream, after its first."
    )
    return_tokens_as_token_ids: bool | None = None

    def check(self) -> None:
        """Check rules that concern several fields. Raises InvalidRequest."""
        if not self.stream and self.stream_options is not None and any(self.stream_options.model_dump().values()):
            raise InvalidRequest("stream_options can only be set with stream=true.", param="stream_options")
        if self.stream and self.prompt_logprobs:
            raise InvalidRequest("prompt_logprobs are not available with stream=true.", param="prompt_logprobs")
        if self.stream and self.use_beam_search:
            raise InvalidRequest("use_beam_search is not available with stream=true.", param="use_beam_search")
        self.check_salt()

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        values = {key: defaults[key] for key in GENERATION_KEYS if defaults.get(key) is not None}
        values |= {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            values["logit_bias"] = _token_biases(self.logit_bias)
        if self.stream:
            values.pop("prompt_logprobs", None)  # 0, which a stream doesn't show
        if not self.logprob_token_ids:
            values.pop("logprob_token_ids", None)
        else:
            if logprobs is None:
                raise InvalidRequest("logprob_token_ids needs logprobs.", param="logprob_token_ids")
            logprobs = None  # logprob_token_ids replaces it
        if self.use_beam_search and 0 <= values.get("temperature", 1) < GREEDY_BELOW:
            values["temperature"] = 1  # beams are ranked, not drawn, so temperature 0 leaves their n outputs different
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, structured_outputs=self.shape(), **values)


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    wrong = [key for key in biases if not _is_token_id(key)]
    if wrong:
        shown = ", ".join(repr(key[:50]) for key in wrong[:MAX_REPORTED_KEYS])
        raise InvalidRequest(f"logit_bias keys must be token ids, got {shown}.", param="logit_bias")
    return {int(token): bias for token, bias in biases.items()}


def _is_token_id(key: str) -> bool:
    try:
        int(key)
    except ValueError:
        return False
    return True
