"""The session of `octavo chat` and `octavo complete`: connect, then answer one input, a pipe, or a terminal.

If input or output is not a terminal, only the answers are printed, to standard output: one for each line of standard
input, or one for the whole of it. The first failure ends the session with exit code 1.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from octavo_server.cli.chat_flags import key_of
from octavo_server.cli.shell import Command, Shell
from octavo_server.cli.terminal_client import StreamedAnswer, TerminalClient, explain_failure, print_hint
from octavo_server.client.api import ApiFailure

INTERRUPTED = 130


class ChatSession(Protocol):
    """Handles the texts and /commands of a session."""

    welcome: str

    @property
    def commands(self) -> Sequence[Command]: ...

    def submit(self, text: str) -> StreamedAnswer: ...


def run_session(args: argparse.Namespace, new_session: Callable[[TerminalClient], ChatSession]) -> int:
    try:
        client = TerminalClient(args.url, key_of(args.api_key), args.model)
    except ApiFailure as error:
        print(f"octavo: {explain_failure(error, args.url)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    with client:
        session = new_session(client)
        if args.quick is not None:
            return _answer_all([args.quick], session)
        if sys.stdin.isatty() and sys.stdout.isatty():
            return _interactive(args.command, client, session)
        inputs = [sys.stdin.read()] if args.stdin == "whole" else sys.stdin
        return _answer_all((text.rstrip("\n") for text in inputs), session)


def _answer_all(texts: Iterable[str], session: ChatSession) -> int:
    try:
        for text in texts:
            if text.strip():
                answer = session.submit(text)
                if answer.was_stopped or answer.failure is not None:
                    return INTERRUPTED if answer.was_stopped else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _interactive(command: str, client: TerminalClient, session: ChatSession) -> int:
    from octavo_server.cli.line_editor import LineEditor, history_file

    print_hint(f"{client.model} at {client.url}\n{session.welcome}")

    def submit(text: str) -> None:
        session.submit(text)

    Shell(LineEditor(history_file(command)), session.commands, submit, print_hint).run()
    return 0


def print_ending(answer: StreamedAnswer, *, shows_stats: bool) -> None:
    """Print the reason if an answer ended early, and its numbers of tokens and times if `shows_stats`."""
    if answer.was_stopped:
        print_hint("[stopped]")
    elif answer.failure is not None:
        print(f"octavo: {answer.failure}", file=sys.stderr)
    elif answer.finish_reason == "length" and sys.stderr.isatty():
        print_hint("[ended at the token limit: raise --max-tokens]")
    if shows_stats and answer.failure is None:
        print_hint(answer.stats())
