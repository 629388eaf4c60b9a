"""Checks the limits of one request; each error names the limit, the value, the field and the flag that sets the limit.

These checks come before a request is tokenised and before the engine checks it, since both cost memory and time.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest

from octavo_server.config import RequestLimits

#: Field of a body -> field of `RequestLimits`, which also names the flag.
_COUNTED = {
    "messages": "max_messages",
    "input": "max_messages",
    "prompt": "max_prompts",
    **dict.fromkeys(("documents", "queries", "text_1", "text_2"), "max_prompts"),
    "system": "max_content_parts",
    "tools": "max_tools",
    "stop": "max_stop_strings",
    "stop_sequences": "max_stop_strings",
    "stop_token_ids": "max_stop_token_ids",
    "bad_words": "max_bad_words",
    "logit_bias": "max_logit_bias",
    "allowed_token_ids": "max_allowed_token_ids",
}
#: Field of a body -> field of `RequestLimits` for the characters of all its strings together.
_TOTALS = {
    "stop": "max_stop_strings_chars",
    "stop_sequences": "max_stop_strings_chars",
    "bad_words": "max_bad_words_chars",
}
#: Fields of which every sequence of a request gets a copy, in the engine core and on the way there.
_COPIED = (
    *("stop", "stop_sequences", "stop_token_ids", "bad_words"),
    *("logit_bias", "allowed_token_ids", "logprob_token_ids"),
)
#: Most fields of a body; the API defines about 100. Validation keeps two copies of each unknown field.
MAX_FIELDS = 1024
#: Most log-probabilities of a response: each takes over 100 bytes of memory until the response is sent.
MAX_LOGPROBS = 10_000_000


def check_counts(body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check the counts of a raw body. A field of a wrong type is ignored here; validation rejects it later."""
    if len(body) > MAX_FIELDS:
        raise InvalidRequest(f"The body has {len(body)} fields, the limit is {MAX_FIELDS}: leave out unknown ones.")
    for name, limit_name in _COUNTED.items():
        _check_count(name, _num_entries(name, body.get(name)), limits, limit_name)
    for name in ("messages", "input"):
        _check_count(f"the content of {name}", _num_parts(body.get(name)), limits, "max_content_parts", param=name)
    n = body.get("n")
    _check_count("n", n if isinstance(n, int | float) else 1, limits, "max_n")
    for name, limit_name in _TOTALS.items():
        _check_lengths(name, body.get(name), limits)
        _check_total(name, _num_chars(body.get(name)), limits, limit_name)
    _check_copies(body, limits)


def check_chars(text: str, limits: RequestLimits) -> None:
    """Check the length of a text: tokenising takes microseconds and some hundred bytes of memory for each character."""
    if len(text) > limits.max_prompt_chars:
        raise InvalidRequest(
            f"The text has {len(text)} characters, the limit is {limits.max_prompt_chars}: send less"
            f"{_or_raise('max_prompt_chars')}",
            param="prompt",
        )


def check_fits(text: str, *, max_model_len: int, longest_token: int) -> None:
    """Check a text before tokenising: if it is longer than `max_model_len` longest tokens, it can't fit the context."""
    if len(text) > max_model_len * longest_token:
        at_least = -(-len(text) // longest_token)
        raise ContextLengthExceeded(max_model_len=max_model_len, num_requested=1, num_input=at_least)


def check_logprobs(num_logprobs: int) -> None:
    """Check the log-probabilities of all tokens that a request may generate or has in its prompts."""
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(
            f"The request asks for up to {num_logprobs} log-probabilities (logprobs times sequences times tokens), "
            f"more than {MAX_LOGPROBS}, the limit: send fewer prompts or logprob_token_ids, or a smaller logprobs, n "
            "or max_tokens.",
            param="logprobs",
        )


def _num_entries(name: str, value: Any) -> int:
    if name in ("prompt", "input") and not _holds_prompts(value):
        return 1
    if name == "tools" and isinstance(value, list):
        nested = (tool.get("tools") for tool in value if isinstance(tool, dict))
        return len(value) + sum(len(tools) for tools in nested if isinstance(tools, list))
    return len(value) if isinstance(value, list | dict) else 1


def _num_parts(messages: Any) -> int:
    if not isinstance(messages, list):
        return 0
    fields = (message.get(name) for message in messages if isinstance(message, dict) for name in ("content", "output"))
    return sum(len(field) for field in fields if isinstance(field, list))


def _holds_prompts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int)


def _check_count(name: str, count: float, limits: RequestLimits, limit_name: str, *, param: str | None = None) -> None:
    limit: int = getattr(limits, limit_name)
    if count > limit:
        asks = f"{name}={count} is" if name == "n" else f"{name} holds {count} entries,"
        message = f"{asks} more than {limit}, the limit: send fewer{_or_raise(limit_name)}"
        raise InvalidRequest(message, param=param or name)


def _check_total(name: str, num_chars: int, limits: RequestLimits, limit_name: str) -> None:
    limit: int = getattr(limits, limit_name)
    if num_chars > limit:
        message = f"{name} holds {num_chars} characters in all, more than {limit}, the limit: send fewer"
        raise InvalidRequest(message + _or_raise(limit_name), param=name)


def _check_copies(body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check the entries of lists in all sequences together. A text counts as many entries as it has characters."""
    factors = {name: _num_prompts(body.get(name)) for name in ("prompt", "messages")}
    n = body.get("n")
    factors["n"] = n if type(n) is int and n > 0 else 1
    num_seqs = prod(factors.values())
    if num_seqs == 1:
        return
    num_entries = sum(_num_chars(body.get(name)) for name in _COPIED)
    if num_seqs * num_entries > limits.max_json_values:
        raise InvalidRequest(
            f"The request has {num_seqs} sequences (prompts times n) with {num_entries} entries or characters each in "
            f"{', '.join(name for name in _COPIED if body.get(name))}: {num_seqs * num_entries} in all, more than "
            f"{limits.max_json_values}, the limit: send fewer{_or_raise('max_json_values')}",
            param=max(factors, key=lambda name: factors[name]),
        )


def _num_prompts(value: Any) -> int:
    """Prompts of a completion, or conversations of a batch; at least 1."""
    return len(value) if isinstance(value, list) and value and isinstance(value[0], str | list) else 1


def _num_chars(value: Any) -> int:
    """Characters of a text or of texts in a list, and the number of other entries of a list or object."""
    if isinstance(value, list):
        return sum(len(entry) if isinstance(entry, str) else 1 for entry in value)
    return len(value) if isinstance(value, str | dict) else 0


def _check_lengths(name: str, value: Any, limits: RequestLimits) -> None:
    texts = value if isinstance(value, list) else [value]
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > limits.max_stop_chars:
        raise InvalidRequest(
            f"{name} holds a string of {longest} characters, the limit is {limits.max_stop_chars}: send a shorter one"
            f"{_or_raise('max_stop_chars')}",
            param=name,
        )


def _or_raise(limit_name: str) -> str:
    return f", or start the server with a larger --{limit_name.replace('_', '-')}."
