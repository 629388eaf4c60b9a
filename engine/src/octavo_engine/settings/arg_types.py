"""Types of command-line arguments: sizes (32k is 32 000, 32K is 32 768, 1.5G is 1.5 * 2**30), seconds, JSON.

The last functions of this module convert the values of single settings, from the command line or from a script.
"""

import argparse
import json
import re
from collections.abc import Mapping
from typing import Any, get_args

from octavo_engine.settings.records import KVEventsConfig, Quantization
from octavo_engine.wire.errors import StartupError

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}
MAX_PORT = 65535
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def size(text: str) -> int:
    factor = _SUFFIXES.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    try:
        value = float(digits) * factor if factor > 1 else int(digits)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (1024, 32k = 32000, 32K = 32768)")
    return int(value)


def json_object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"top_p": 0.9}}')
    return parsed


def json_list(text: str) -> list[str]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(item, str) for item in parsed):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON list of strings, such as ["https://example.org"]')
    return parsed


def metrics_prefix(text: str) -> str:
    if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} can't begin a metric's name: use letters, digits, '_' and ':'")
    return text


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _SWITCH[text.lower()]


def size_or_auto(text: str) -> int | None:
    return None if text in ("auto", "-1") else size(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds (0 or more)")
    return value


def positive_seconds(text: str) -> float:
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is too short: give more than 0 seconds")
    return value


def whole_seconds(text: str) -> int:
    return round(seconds(text))


def dtype_name(value: Any) -> str:
    word = str(value).removeprefix("torch.")
    return DTYPE_ALIASES.get(word, word)


def names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value or ()


def quantization_name(value: Any) -> Any:
    if value is not None and value not in get_args(Quantization):
        raise StartupError(
            f"quantization={value!r} is not supported by this version: serve a GGUF, GPTQ, AWQ, compressed-tensors, "
            "FP8 or bitsandbytes checkpoint, or quantise another checkpoint to int8 or int4 while it loads. "
            f"Leave it out, or set it to {', '.join(map(repr, get_args(Quantization)))}."
        )
    return value


def capture_sizes(value: Any) -> tuple[int, ...]:
    return tuple(sorted(set([value] if isinstance(value, int) else value or ())))


def generation_override(given: dict[str, Any]) -> dict[str, Any]:
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    if not given.keys() <= set(known):
        raise StartupError(
            f"override_generation_config={given!r} is not supported by this version: give a JSON object with fields of "
            f"{', '.join(known)}."
        )
    return given


def kv_events(config: KVEventsConfig | None) -> KVEventsConfig | None:
    """Return None if events are off."""
    return config if config and config.enable_kv_cache_events and config.publisher != "null" else None


def media_limits(given: Mapping[str, Any]) -> dict[str, int]:
    """Read the limit of images per prompt, in vLLM's two forms: `{"image": 2}` or `{"image": {"count": 2}}`.

    Raises StartupError.
    """
    limits = {kind: each.get("count", 0) if isinstance(each, Mapping) else each for kind, each in given.items()}
    for kind, limit in limits.items():
        if type(limit) is not int or limit < 0 or (limit and kind != "image"):
            raise StartupError(
                f'limit_mm_per_prompt: {kind}={limit!r:.40} is not supported: use a whole number for "image", and 0 '
                "for other media."
            )
    return limits
