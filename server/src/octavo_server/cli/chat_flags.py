"""Flags of `octavo chat` and `octavo complete`: vLLM's flags, short names of some flags, and sampling parameters."""

import argparse
import os
from typing import Any

from octavo_engine.settings.arg_types import json_object

DEFAULT_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLES = ("OPENAI_API_KEY", "OCTAVO_API_KEY")

#: Flag -> type, help. The field of the request has the name of the flag, with underscores for dashes.
SAMPLING: dict[str, tuple[Any, str]] = {
    "--temperature": (float, "Randomness of sampling; 0: always the likeliest token."),
    "--top-p": (float, "Total probability of the likeliest tokens, from which the next token is sampled."),
    "--top-k": (int, "Number of the likeliest tokens, from which the next token is sampled."),
    "--min-p": (float, "Smallest probability of a token to sample, as a share of the likeliest token's."),
    "--max-tokens": (int, "Largest number of tokens of an answer."),
    "--seed": (int, "Seed of sampling; the same seed gives the same answer."),
    "--frequency-penalty": (float, "Amount to subtract from a token's logit for each time it was generated."),
    "--presence-penalty": (float, "Amount to subtract from a token's logit if it was generated before."),
    "--repetition-penalty": (float, "Factor that makes tokens of the prompt and the answer less likely; 1: off."),
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
        "--url", default=DEFAULT_URL, help=f"URL of the API of a running server or router. Default: {DEFAULT_URL}."
    )
    group.add_argument(
        "--model",
        "--model-name",
        dest="model",
        metavar="NAME",
        help="Name of the model in requests. Default: the first model that the server lists.",
    )
    variables = " or ".join(f"${name}" for name in KEY_VARIABLES)
    group.add_argument("--api-key", metavar="KEY", help=f"API key to send to the server. Default: {variables}.")


def _add_input(parser: argparse.ArgumentParser, *flags: str) -> None:
    *names, metavar = flags
    group = parser.add_argument_group("input and output")
    group.add_argument(*names, metavar=metavar, help="Single input: the command prints the answer and exits.")
    group.add_argument(
        *("--stdin",),
        choices=("lines", "whole"),
        default="lines",
        help="Division of piped input: each line, or the whole of standard input, is one input. Default: lines.",
    )
    group.add_argument("--stats", action="store_true", help="Print numbers of tokens and times after each answer.")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the server's settings)")
    for flag, (kind, text) in SAMPLING.items():
        group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="Text that ends the answer; may be repeated.")
    group.add_argument(
        "--extra-body",
        type=json_object,
        metavar="JSON",
        default={},
        help="Fields to add to the body of each request, as a JSON object.",
    )


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    names = [flag[2:].replace("-", "_") for flag in SAMPLING]
    params = {name: value for name in (*names, "stop") if (value := getattr(args, name)) is not None}
    return {**params, **args.extra_body}


def key_of(args: argparse.Namespace) -> str | None:
    key: str | None = args.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    return key
