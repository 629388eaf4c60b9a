"""The frame of `octavo chat` and `octavo complete`: connect, then answer one input, a pipe, or a terminal.

Without a terminal there is no prompt and no noise: answers go to standard output, one for each line (or for the whole
of standard input), and the first failure ends it with exit code 1.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from octavo_server.cli.answers import Answer, Answerer, explain, hint
from octavo_server.cli.chat_flags import key_of
from octavo_server.cli.shell import Command, Shell
from octavo_server.client.api import ApiFailure

INTERRUPTED = 130


class Turns(Protocol):
    """What is done with a text, and with a /command."""

    welcome: str

    @property
    def commands(self) -> Sequence[Command]: ...

    def take(self, text: str) -> Answer: ...


def converse(args: argparse.Namespace, open_turns: Callable[[Answerer], Turns]) -> int:
    try:
        answerer = Answerer(args.url, key_of(args), args.model)
    except ApiFailure as error:
        print(f"octavo: {explain(error, args.url)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    with answerer:
        turns = open_turns(answerer)
        if args.quick is not None:
            return _answer_all([args.quick], turns)
        if sys.stdin.isatty() and sys.stdout.isatty():
            return _interactive(args.command, answerer, turns)
        inputs = [sys.stdin.read()] if args.stdin == "whole" else sys.stdin
        return _answer_all((text.rstrip("\n") for text in inputs), turns)


def _answer_all(texts: Iterable[str], turns: Turns) -> int:
    try:
        for text in texts:
            if text.strip():
                answer = turns.take(text)
                if answer.was_stopped or answer.failure is not None:
                    return INTERRUPTED if answer.was_stopped else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _interactive(command: str, answerer: Answerer, turns: Turns) -> int:
    from octavo_server.cli.line_editor import LineEditor, history_file

    hint(f"{answerer.model} at {answerer.url}\n{turns.welcome}")

    def take(text: str) -> None:
        turns.take(text)

    Shell(LineEditor(history_file(command)), turns.commands, take, hint).run()
    return 0


def tell_ending(answer: Answer, *, shows_stats: bool) -> None:
    """What the text alone doesn't show."""
    if answer.was_stopped:
        hint("[stopped]")
    elif answer.failure is not None:
        print(f"octavo: {answer.failure}", file=sys.stderr)
    elif answer.finish_reason == "length" and sys.stderr.isatty():
        hint("[cut at the token limit: raise --max-tokens]")
    if shows_stats and answer.failure is None:
        hint(answer.stats())
