"""Reads lines from a terminal with GNU readline: arrow keys, and a history that is kept between sessions.

The history is stored in $XDG_STATE_HOME/octavo and readable only by its owner, since it contains prompts.
"""

import contextlib
import os
import readline
from pathlib import Path

_MOST_LINES = 2000


def history_file(name: str) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "octavo" / f"{name}_history"


class LineEditor:
    """Reads lines. If the history file can't be read or written, the session keeps no history."""

    def __init__(self, history: Path) -> None:
        self._history = history
        readline.set_history_length(_MOST_LINES)
        readline.set_auto_history(False)
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            history.touch(mode=0o600)
            readline.read_history_file(history)

    def read(self, prompt: str) -> str:
        """Read a line; one ending in a backslash continues on the next. Raises EOFError (Ctrl-D), KeyboardInterrupt."""
        lines = [input(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("." * (len(prompt) - 1) + " "))
        for line in lines:
            self._remember(line)
        return "\n".join(lines)

    def _remember(self, line: str) -> None:
        latest = readline.get_history_item(readline.get_current_history_length())
        if line.strip() and line != latest:
            readline.add_history(line)
            with contextlib.suppress(OSError):
                readline.write_history_file(self._history)
