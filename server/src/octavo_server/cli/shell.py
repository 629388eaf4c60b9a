"""The loop of an interactive command: read a line, do a /command or pass the text on, until told to leave.

At the prompt Ctrl-C clears the line, twice leaves, Ctrl-D leaves. What Ctrl-C does during an answer is the answer's
own affair: here only the prompt is looked after.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

PROMPT = "> "


class Editor(Protocol):
    def read(self, prompt: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    argument: str  # as the help shows it; empty: it takes none
    help: str
    run: Callable[[str], None]


class Shell:
    """`on_text` gets every line that is no command."""

    def __init__(
        self, editor: Editor, commands: Sequence[Command], on_text: Callable[[str], None], say: Callable[[str], None]
    ) -> None:
        self._editor = editor
        self._on_text = on_text
        self._say = say
        own = (Command("help", "", "this list", self._help), Command("exit", "", "leave, as Ctrl-D does", self._leave))
        self._commands = {command.name: command for command in (*commands, *own)}
        self._is_open = True

    def run(self) -> None:
        interrupts = 0
        while self._is_open and interrupts < 2:
            try:
                line = self._editor.read(PROMPT)
            except EOFError:
                self._say("")
                return
            except KeyboardInterrupt:
                interrupts += 1
                self._say("" if interrupts > 1 else "\n(Ctrl-C again or Ctrl-D leaves)")
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
            self._say(f"There is no /{name}: /help lists the commands; a text that starts with / needs a space before.")
        elif argument.strip() and not command.argument:
            self._say(f"/{name} takes nothing after it.")
        else:
            command.run(argument.strip())

    def _help(self, _: str) -> None:
        shown = [(f"/{c.name} {c.argument}".strip(), c.help) for c in self._commands.values()]
        width = max(len(usage) for usage, _ in shown)
        self._say("\n".join(f"  {usage:{width}}  {text}" for usage, text in shown))
        self._say(
            "  A line that ends in \\ goes on in the next. Ctrl-C stops an answer, at the prompt it clears the line."
        )

    def _leave(self, _: str) -> None:
        self._is_open = False
