"""The session of `octavo chat` and `octavo complete`: connect, then answer one input, a pipe, or a terminal.

If input or output is not a terminal, only the answers are printed, to standard output: one for each line of standard
input, or one for the whole of it. The first failure ends the session with exit code 1.

`Shell`: at the prompt Ctrl-C clears the line, a second Ctrl-C exits, and so does Ctrl-D. Ctrl-C during an answer is
handled by `TerminalClient`.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo_server.cli.chat_flags import key_of
from octavo_server.cli.terminal_client import StreamedAnswer, TerminalClient, explain_failure, print_hint
from octavo_server.client.api import ApiFailure

if TYPE_CHECKING:
    from octavo_server.cli.line_editor import LineEditor


INTERRUPTED = 130
PROMPT = "> "


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    argument: str  # as shown in the help; empty if the command takes none
    help: str
    run: Callable[[str], None]


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


class Shell:
    """Runs the loop. `on_text` gets every line that is not a command; `print_line` prints messages of the shell."""

    def __init__(
        self,
        editor: "LineEditor",
        commands: Sequence[Command],
        on_text: Callable[[str], None],
        print_line: Callable[[str], None],
    ) -> None:
        self._editor = editor
        self._on_text = on_text
        self._print_line = print_line
        own = (
            Command("help", "", "show this list", self._help),
            Command("exit", "", "exit, as Ctrl-D does", self._leave),
        )
        self._commands = {command.name: command for command in (*commands, *own)}
        self._is_open = True

    def run(self) -> None:
        interrupts = 0
        while self._is_open and interrupts < 2:
            try:
                line = self._editor.read(PROMPT)
            except EOFError:
                self._print_line("")
                return
            except KeyboardInterrupt:
                interrupts += 1
                self._print_line("" if interrupts > 1 else "\n(Ctrl-C again or Ctrl-D exits)")
                continue
            interrupts = 0
            self._handle(line)

    def _handle(self, line: str) -> None:
        if not line.startswith("/"):
            if line.strip():
                self._on_text(line)
            return
        name, _, argument = line[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            self._print_line(
                f"There is no command /{name}: /help lists the commands; put a space before a text that starts with /."
            )
        elif argument.strip() and not command.argument:
            self._print_line(f"/{name} takes no argument.")
        else:
            command.run(argument.strip())

    def _help(self, _: str) -> None:
        shown = [(f"/{c.name} {c.argument}".strip(), c.help) for c in self._commands.values()]
        width = max(len(usage) for usage, _ in shown)
        self._print_line("\n".join(f"  {usage:{width}}  {text}" for usage, text in shown))
        self._print_line(
            "  A line that ends in \\ continues on the next. Ctrl-C stops an answer; at the prompt it clears the line."
        )

    def _leave(self, _: str) -> None:
        self._is_open = False
