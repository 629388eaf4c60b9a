"""Flags that take seconds."""

from argparse import ArgumentTypeError
from typing import Any


def add_seconds(group: Any, flag: str, text: str, *, default: float | None) -> None:
    shown = "none" if default is None else f"{default:g}"
    group.add_argument(flag, type=seconds, default=default, metavar="S", help=f"{text} (default: {shown})")


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def some_seconds(text: str) -> float:
    value = seconds(text)
    if not value:
        raise ArgumentTypeError(f"{text!r}: more than 0 seconds")
    return value


def whole_seconds(text: str) -> int:
    return round(seconds(text))
