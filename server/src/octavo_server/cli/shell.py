"""The loop of an interactive command: reads a line and runs it as a /command or submits it, until the user exits.

At the prompt Ctrl-C clears the line, a second Ctrl-C exits, and so does Ctrl-D. Ctrl-C during an answer is handled by
`TerminalClient`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_server.cli.line_editor import LineEditor

PROMPT = "> "


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    argument: str  # as shown in the help; empty if the command takes none
    help: str
    run: Callable[[str], None]


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
