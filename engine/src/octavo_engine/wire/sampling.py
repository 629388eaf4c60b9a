"""`SamplingParams` with vLLM's field names, defaults and rules, shared by `LLM` and the HTTP API."""

import copy
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import UnionType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.structured import StructuredOutputs

DRAW_VERSION = 2  # version of docs/reference/sampling.md: with another, a seed gives other tokens
MAX_N = 16384
INT32_MAX = 2**31 - 1
MAX_LOGPROB_TOKEN_IDS = 128
MIN_TEMPERATURE = 0.01
GREEDY_BELOW = 1e-5
REPETITION_PENALTY_RANGE = (1e-6, 1e6)  # outside it fp32 logits become infinite or NaN, for a whole batch


#: vLLM's fields that are not implemented -> accepted values, which have no effect.
_STILL_TO_COME: dict[str, tuple[Any, ...]] = {
    "flat_logprobs": (False,),
    "prompt_logprob_start": (None, 0),
    "prompt_logprob_token_ids": (None,),
    "repetition_detection": (None,),
}


class RequestOutputKind(Enum):
    """Outputs of `AsyncLLM`: each has all text so far, each has only the new text, or only the last one is yielded."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class Encoder(Protocol):
    """The part of a tokenizer that `update_from_tokenizer` uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def _check(ok: bool, param: str, rule: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"{param} must be {rule}, got {reprlib.repr(value)}.", param=param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The sampling settings of one request.

    Construction validates and normalises (`stop` becomes a list, `seed` -1 becomes None, a temperature below
    1e-5 means greedy). It raises InvalidRequest, which names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    #: Tokens whose log-probabilities are returned, beside the chosen token's and instead of the most likely tokens'.
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # without effect: texts have no spaces that the tokens lack
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    #: `AsyncLLM` yields the first output, then one for this many new tokens, then the last.
    stream_interval: int | None = None
    #: The largest number of reasoning tokens, after which `reasoning_end_token_id` is forced; None or -1: no limit.
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputs | None = None
    extra_args: dict[str, Any] | None = None  # for executors of tests; the engine's own reads none
    #: `bad_words` as token sequences, set by the front end, which has the tokenizer, and read by the sampler.
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    #: Special tokens whose text is kept while other special tokens are skipped: the markers that output parsers need.
    shown_special_token_ids: list[int] = field(default_factory=list)
    #: With `structured_outputs` or `thinking_token_budget`: the token that ends reasoning, after which the shape
    #: applies, and the token that starts reasoning, None if reasoning is open from the first token on.
    reasoning_end_token_id: int | None = None
    reasoning_start_token_id: int | None = None
    flat_logprobs: bool = False
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: list[int] | None = None
    repetition_detection: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, dict):
            self.logit_bias = _read_bias(self.logit_bias)
        self._check_types()
        self._normalise()
        self._check_counts()
        self._check_distribution()
        self._check_lists()
        self._check_still_to_come()

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """Create the parameters from fields of which None means the default, except for `max_tokens` (no limit)."""
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self) -> "SamplingParams":
        return copy.deepcopy(self)

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Add the end tokens of generation_config.json except `eos_token_id`, unless `ignore_eos` is set."""
        ids = generation_config.get("eos_token_id")
        others = [ids] if isinstance(ids, int) else [*(ids or ())]
        if not self.ignore_eos:
            new = [*(self.stop_token_ids or ()), *(i for i in others if i != eos_token_id)]
            self.stop_token_ids = list(dict.fromkeys(new))

    def update_from_tokenizer(self, tokenizer: Encoder) -> None:
        """Tokenise each bad word twice: as it appears at the start of a text and after a space. White space that begins
        a word, other than one space, is part of the word."""
        forms = [form for word in self.bad_words or () for form in _word_forms(word)]
        sequences = [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms]
        self.bad_words_token_ids = [list(ids) for ids in dict.fromkeys(sequences) if ids]

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def masks_by_newest(self) -> bool:
        """True if the mask depends on the newest token, as with bad words of several tokens or a thinking budget."""
        return self.thinking_token_budget is not None or any(len(ids) > 1 for ids in self.bad_words_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def reads_prefix_cache(self) -> bool:
        return not (self.skip_reading_prefix_cache or self.prompt_logprobs is not None)

    def _check_types(self) -> None:
        """Raise InvalidRequest unless each value has its field's type: the engine core accepts nothing else."""
        for name, (kind, default) in _TYPES.items():
            value = getattr(self, name)
            if value is not default and not _has_type(value, kind):
                rule = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
                _check(False, name, f"of type {rule}", value)

    def _normalise(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or []))
        self.bad_words = list(self.bad_words or [])
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None

    def _check_counts(self) -> None:
        _check(_is_int(self.n) and 1 <= self.n <= MAX_N, "n", f"an integer in [1, {MAX_N}]", self.n)
        ok = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _check(ok, "max_tokens", "at least 1", self.max_tokens)
        _check(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None:
            rule = f"at most max_tokens={self.max_tokens}"
            _check(self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        for param in ("logprobs", "prompt_logprobs"):
            value = getattr(self, param)
            _check(value is None or (_is_int(value) and value >= -1), param, "-1 (the whole vocabulary) or more", value)
        ok = self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63)
        _check(ok, "seed", f"in [{-(2**63)}, {2**63 - 1}]", self.seed)
        interval, budget = self.stream_interval, self.thinking_token_budget
        _check(interval is None or 1 <= interval <= INT32_MAX, "stream_interval", f"in [1, {INT32_MAX}]", interval)
        rule = f"-1 (no limit), or in [0, {INT32_MAX}]"
        _check(budget is None or 0 <= budget <= INT32_MAX, "thinking_token_budget", rule, budget)

    def _check_distribution(self) -> None:
        for param in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, param)
            _check(-2.0 <= value <= 2.0, param, "in [-2, 2]", value)
        value = self.repetition_penalty
        low, high = REPETITION_PENALTY_RANGE
        _check(low <= value <= high, "repetition_penalty", f"in [{low}, {high}]", value)
        _check(0.0 <= self.temperature <= 2.0, "temperature", "in [0, 2]", self.temperature)
        _check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        ok = _is_int(self.top_k) and 0 <= self.top_k <= INT32_MAX
        _check(ok, "top_k", f"0 or -1 (off), or in [1, {INT32_MAX}]", self.top_k)
        _check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        if self.is_greedy:
            _check(self.n == 1, "n", "1 when temperature is 0 (greedy copies would be equal)", self.n)
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        else:
            self.temperature = max(self.temperature, MIN_TEMPERATURE)

    def _check_lists(self) -> None:
        _check(all(isinstance(s, str) and s for s in self.stop or ()), "stop", "non-empty strings", self.stop)
        _check(not self.stop or self.detokenize, "stop", "used with detokenize=True", self.stop)
        _check(all(self.bad_words or ()), "bad_words", "non-empty strings", self.bad_words)
        ok = self.allowed_token_ids is None or len(self.allowed_token_ids) > 0
        _check(ok, "allowed_token_ids", "a non-empty list", self.allowed_token_ids)
        ids = self.logprob_token_ids
        if ids is not None:
            ok = 1 <= len(ids) == len(set(ids)) <= MAX_LOGPROB_TOKEN_IDS
            _check(ok, "logprob_token_ids", f"1 to {MAX_LOGPROB_TOKEN_IDS} different token ids", ids)
            rule = f"of as many ids as logprobs={self.logprobs}, or used without logprobs"
            _check(self.logprobs in (None, len(ids)), "logprob_token_ids", rule, ids)

    def _check_still_to_come(self) -> None:
        for name, accepted in _STILL_TO_COME.items():
            value = getattr(self, name)
            rule = " or ".join(repr(choice) for choice in accepted)
            _check(value in accepted, name, f"{rule}, as this version does not implement it", value)


def _word_forms(word: str) -> list[str]:
    bare = word.removeprefix(" ")
    return [word] if not bare or bare[0].isspace() else [bare, f" {bare}"]


def _read_bias(given: dict[Any, Any]) -> dict[int, float]:
    """Convert the keys, which JSON makes strings, and clamp the values to [-100, 100]."""
    try:
        return {int(token_id): min(100.0, max(-100.0, float(bias))) for token_id, bias in given.items()}
    except (TypeError, ValueError, OverflowError) as error:
        text = f"logit_bias must map token ids to numbers, got {reprlib.repr(given)}."
        raise InvalidRequest(text, param="logit_bias") from error


def _has_type(value: object, kind: Any) -> bool:
    """Check as JSON does: a bool is no number, an int is a float, too, and a tuple is a list."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_has_type(value, each) for each in arguments)
    if origin is list:
        return isinstance(value, list | tuple) and _all_have_type(value, *arguments)
    if origin is dict:
        keys, values = arguments
        return isinstance(value, dict) and _all_have_type(value, keys) and _all_have_type(value.values(), values)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def _all_have_type(values: Iterable[object], kind: Any) -> bool:
    types = set(map(type, values))  # far fewer than values
    return types <= {kind} or all(_has_type(value, kind) for value in values)


_HINTS = get_type_hints(SamplingParams)
_TYPES = {each.name: (_HINTS[each.name], each.default) for each in fields(SamplingParams)}
