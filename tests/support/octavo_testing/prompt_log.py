"""A log file of the prompts that reached a scripted engine; a test reads there what an attack achieved."""

import os
from collections.abc import Iterable
from pathlib import Path

PROMPT_LOG = "OCTAVO_TEST_PROMPT_LOG"  # environment variable with the path of the log


class PromptLog:
    """The engine's side of the log. A path of None means that nothing is logged."""

    def __init__(self, path: str | None) -> None:
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, token_ids: Iterable[int]) -> None:
        """Append one prompt as a line. Token ids below 256 are the bytes of its text."""
        if self._fd is not None:
            os.write(self._fd, bytes(token for token in token_ids if token < 256) + b"\n")


def read_prompt_log(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
