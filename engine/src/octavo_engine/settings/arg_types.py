"""Types of command-line arguments: sizes (32k is 32 000, 32K is 32 768, 1.5G is 1.5 * 2**30), seconds, JSON."""

import argparse
import json
import re
from typing import Any

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

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


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to {MAX_PORT}")
    return int(text)


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


def positive_count(text: str) -> int:
    value = size(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


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
