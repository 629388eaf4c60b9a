"""How much one request may ask for: each refusal gives the limit, the value, the field and the flag that raises it.

What is checked here would cost memory or time before the engine's own limits (context, vocabulary) are looked at.
"""

import re
from array import array
from collections.abc import Collection
from itertools import accumulate
from typing import Any

from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest
from pydantic import BaseModel

from octavo_server.config import RequestLimits

#: One that isn't closed reaches to the end, so that no body makes this start over and over.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: one level down, one level up
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")

#: Field of a body -> field of `RequestLimits`, and so the flag.
_COUNTED = {
    "messages": "max_messages",
    "input": "max_messages",
    "prompt": "max_prompts",
    "stop": "max_stop_strings",
    "stop_token_ids": "max_stop_token_ids",
    "bad_words": "max_bad_words",
    "logit_bias": "max_logit_bias",
    "allowed_token_ids": "max_allowed_token_ids",
}


def check_depth(body: bytes, limits: RequestLimits) -> None:
    """Without parsing. Few bodies have so many brackets that they have to be looked at one by one."""
    limit = limits.max_json_depth
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    steps = array("b", _STRINGS.sub(b"", body).translate(_STEPS, _NO_BRACKETS))
    if max(accumulate(steps), default=0) > limit:
        raise InvalidRequest(
            f"The JSON body is nested more than {limit} levels deep, the limit: flatten it{_or_raise('max_json_depth')}"
        )


def check_counts(body: BaseModel, limits: RequestLimits) -> None:
    for name, limit_name in _COUNTED.items():
        _check_count(name, _num_entries(name, getattr(body, name, None)), limits, limit_name)
    _check_count("n", getattr(body, "n", None) or 1, limits, "max_n")
    for name in ("stop", "bad_words"):
        _check_lengths(name, getattr(body, name, None) or (), limits)


def check_chars(text: str, limits: RequestLimits) -> None:
    """Tokenising takes microseconds and some hundred bytes of memory a character."""
    if len(text) > limits.max_prompt_chars:
        raise InvalidRequest(
            f"The text has {len(text)} characters, the limit is {limits.max_prompt_chars}: send less"
            f"{_or_raise('max_prompt_chars')}",
            param="prompt",
        )


def check_fits(text: str, *, max_model_len: int, longest_token: int) -> None:
    """Before tokenising: a text of more characters than so many of the longest tokens spell can't fit the context."""
    if len(text) > max_model_len * longest_token:
        at_least = -(-len(text) // longest_token)
        raise ContextLengthExceeded(max_model_len=max_model_len, num_requested=1, num_input=at_least)


def _num_entries(name: str, value: Any) -> int:
    if value is None:
        return 0
    if name == "prompt" and not _holds_prompts(value):
        return 1
    return 1 if isinstance(value, str) else len(value)


def _holds_prompts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int)


def _check_count(name: str, count: int, limits: RequestLimits, limit_name: str) -> None:
    limit: int = getattr(limits, limit_name)
    if count > limit:
        asks = f"{name}={count} is" if name == "n" else f"{name} holds {count} entries,"
        raise InvalidRequest(f"{asks} more than {limit}, the limit: send fewer{_or_raise(limit_name)}", param=name)


def _check_lengths(name: str, texts: str | Collection[str], limits: RequestLimits) -> None:
    longest = len(texts) if isinstance(texts, str) else max(map(len, texts), default=0)
    if longest > limits.max_stop_chars:
        raise InvalidRequest(
            f"{name} holds a string of {longest} characters, the limit is {limits.max_stop_chars}: send a shorter one"
            f"{_or_raise('max_stop_chars')}",
            param=name,
        )


def _or_raise(limit_name: str) -> str:
    return f", or start the server with a larger --{limit_name.replace('_', '-')}."
