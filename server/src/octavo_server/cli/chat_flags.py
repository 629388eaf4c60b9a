"""Flags of `octavo chat` and `octavo complete`: vLLM's flags, short names for some of them, and sampling."""

import argparse
import os
from typing import Any

from octavo_server.cli.arg_types import json_object

DEFAULT_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLES = ("OPENAI_API_KEY", "OCTAVO_API_KEY")

#: Flag -> type, help. A flag with underscores for dashes is the name of the request's field.
SAMPLING: dict[str, tuple[Any, str]] = {
    "--temperature": (float, "Randomness of sampling; 0: always the likeliest token."),
    "--top-p": (float, "Cumulative probability of the likeliest tokens to sample from."),
    "--top-k": (int, "Number of the likeliest tokens to sample from."),
    "--min-p": (float, "Least probability of a token to sample, relative to the likeliest token."),
    "--max-tokens": (int, "Most tokens of an answer."),
    "--seed": (int, "Seed of sampling; the same seed gives the same answer."),
    "--frequency-penalty": (float, "Penalty of a token for each time it was generated."),
    "--presence-penalty": (float, "Penalty of a token that was already generated."),
    "--repetition-penalty": (float, "Factor that divides the odds of tokens that already appeared; 1: off."),
}


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    _add_connection(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument(
        "--system", "--system-prompt", dest="system", metavar="TEXT", default="", help="System prompt. Default: none."
    )
    _add_input(parser, "-q", "--quick", "MESSAGE")
    _add_sampling(parser)


def add_complete_flags(parser: argparse.ArgumentParser) -> None:
    _add_connection(parser)
    _add_input(parser, "-q", "--quick", "PROMPT")
    _add_sampling(parser)


def _add_connection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--url", default=DEFAULT_URL, help=f"URL of the API of a running server. Default: {DEFAULT_URL}."
    )
    group.add_argument(
        "--model",
        "--model-name",
        dest="model",
        metavar="NAME",
        help="Name of the model. Default: the first one of the server.",
    )
    variables = " or ".join(f"${name}" for name in KEY_VARIABLES)
    group.add_argument("--api-key", metavar="KEY", help=f"API key of the server. Default: {variables}.")


def _add_input(parser: argparse.ArgumentParser, *flags: str) -> None:
    *names, metavar = flags
    group = parser.add_argument_group("input and output")
    group.add_argument(*names, metavar=metavar, help="Single input to answer before the command exits.")
    group.add_argument(
        *("--stdin",),
        choices=("lines", "whole"),
        default="lines",
        help="Unit of one input from a pipe: each line, or the whole of standard input. Default: lines.",
    )
    group.add_argument("--stats", action="store_true", help="Line with tokens and times after each answer.")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: that of the server)")
    for flag, (kind, text) in SAMPLING.items():
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="Text that ends the answer; may be repeated.")
    group.add_argument(
        "--extra-body",
        type=json_object,
        metavar="JSON",
        default={},
        help="More fields of the request, as a JSON object.",
    )


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    names = [flag[2:].replace("-", "_") for flag in SAMPLING]
    given = {name: value for name in (*names, "stop") if (value := getattr(args, name)) is not None}
    return {**given, **args.extra_body}


def key_of(args: argparse.Namespace) -> str | None:
    found: str | None = args.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    return found
