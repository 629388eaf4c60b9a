"""Flags of `octavo chat` and `octavo complete`: vLLM's flags, short names of some flags, and sampling parameters."""

import argparse
import os
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Literal

from octavo_engine.settings.declare import Declared, own_settings, setting

from octavo_server.cli.declared_flags import add_flags

DEFAULT_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLES = ("OPENAI_API_KEY", "OCTAVO_API_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFlags(Declared):
    """The server to talk to."""

    url: str = setting(DEFAULT_URL, "URL of the API of a running server or router.", group="connection", metavar=None)
    model: str | None = setting(
        None,
        "Name of the model in requests.",
        flags=("--model-name",),
        metavar="NAME",
        unset="the first model that the server lists",
    )
    api_key: str | None = setting(None, "API key to send to the server.", env=KEY_VARIABLES, metavar="KEY", secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFlags(Declared):
    """Input and output of a session."""

    quick: str | None = setting(
        None,
        "Single input: the command prints the answer and exits.",
        group="input and output",
        flags=("-q",),
        unset="all of standard input",
    )
    stdin: Literal["lines", "whole"] = setting(
        "lines", "Unit of piped input: each line, or all of standard input, is one input."
    )
    stats: bool = setting(False, "Print numbers of tokens and times after each answer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags(Declared):
    system: str = setting("", "System prompt.", group="conversation", flags=("--system-prompt",))


def _sampling(text: str, **details: Any) -> Any:
    return setting(None, text, unset="the server's", **details)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags(Declared):
    """Fields of a request; one without a value is not sent."""

    temperature: float | None = _sampling("Randomness of sampling; 0: always the likeliest token.", group="sampling")
    top_p: float | None = _sampling("Total probability of the likeliest tokens, from which the next token is sampled.")
    top_k: int | None = _sampling("Number of the likeliest tokens, from which the next token is sampled.", parse=int)
    min_p: float | None = _sampling("Smallest probability of a token to sample, relative to that of the likeliest.")
    max_tokens: int | None = _sampling("Largest number of tokens of an answer.")
    seed: int | None = _sampling("Seed of sampling; the same seed gives the same answer.", parse=int)
    frequency_penalty: float | None = _sampling(
        "Amount to subtract from a token's logit for each time it was generated."
    )
    presence_penalty: float | None = _sampling("Amount to subtract from a token's logit if it was generated before.")
    repetition_penalty: float | None = _sampling(
        "Factor by which tokens that occur in the prompt or the answer become less likely; 1: off."
    )
    stop: tuple[str, ...] = setting(tuple, "Texts that end the answer.", repeats=True)
    extra_body: dict[str, Any] = setting({}, "Fields to add to the body of each request, as a JSON object.")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ConnectionFlags, ChatFlags, InputFlags, SamplingFlags, negatable=False)


def add_complete_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ConnectionFlags, InputFlags, SamplingFlags, negatable=False)


def sampling_of(args: argparse.Namespace, *, but: Container[str] = ()) -> dict[str, Any]:
    """Return the fields of a request that the flags set."""
    given = {each.name: getattr(args, each.name) for each in own_settings(SamplingFlags) if each.name not in but}
    extra: dict[str, Any] = given.pop("extra_body")
    return {name: value for name, value in given.items() if value is not None} | extra


def key_of(api_key: str | None = None) -> str | None:
    """Return the API key of the flag, or else of the first variable that is set."""
    return api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
