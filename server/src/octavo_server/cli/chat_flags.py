"""The flags of `octavo chat` and `octavo complete`: vLLM's, shorter names for some, and sampling."""

import argparse
import json
import os
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLES = ("OPENAI_API_KEY", "OCTAVO_API_KEY")

#: Flag -> type, help. Their names with underscores are the fields of the request.
SAMPLING: dict[str, tuple[Any, str]] = {
    "--temperature": (float, "randomness; 0: always the likeliest token"),
    "--top-p": (float, "sample from the likeliest tokens that have this probability together"),
    "--top-k": (int, "sample from this many of the likeliest tokens"),
    "--min-p": (float, "drop tokens below this share of the likeliest one's probability"),
    "--max-tokens": (int, "most tokens of an answer"),
    "--seed": (int, "the same seed gives the same answer"),
    "--frequency-penalty": (float, "against tokens, the more often they came"),
    "--presence-penalty": (float, "against tokens that came already"),
    "--repetition-penalty": (float, "divides the odds of tokens that came already; 1: off"),
}


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    _add_connection(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", "--system-prompt", dest="system", metavar="TEXT", default="", help="system prompt")
    _add_input(parser, "-q", "--quick", "MESSAGE")
    _add_sampling(parser)


def add_complete_flags(parser: argparse.ArgumentParser) -> None:
    _add_connection(parser)
    _add_input(parser, "-q", "--quick", "PROMPT")
    _add_sampling(parser)


def _add_connection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection")
    group.add_argument("--url", default=DEFAULT_URL, help=f"the API of a running server (default: {DEFAULT_URL})")
    group.add_argument("--model", "--model-name", dest="model", metavar="NAME", help="(default: the server's first)")
    variables = " or ".join(f"${name}" for name in KEY_VARIABLES)
    group.add_argument("--api-key", metavar="KEY", help=f"(default: {variables})")


def _add_input(parser: argparse.ArgumentParser, *flags: str) -> None:
    *names, metavar = flags
    group = parser.add_argument_group("input and output")
    group.add_argument(*names, metavar=metavar, help="answer this one and leave")
    group.add_argument(
        *("--stdin",),
        choices=("lines", "whole"),
        default="lines",
        help="what one input is when it comes through a pipe (default: lines)",
    )
    group.add_argument("--stats", action="store_true", help="after each answer, its tokens and times")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: what the server does)")
    for flag, (kind, text) in SAMPLING.items():
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given several times")
    group.add_argument("--extra-body", type=json_object, metavar="JSON", default={}, help="more fields of the request")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    names = [flag[2:].replace("-", "_") for flag in SAMPLING]
    given = {name: value for name in (*names, "stop") if (value := getattr(args, name)) is not None}
    return {**given, **args.extra_body}


def key_of(args: argparse.Namespace) -> str | None:
    found: str | None = args.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    return found


def json_object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return parsed
