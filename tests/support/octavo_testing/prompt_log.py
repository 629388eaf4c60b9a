"""The prompts that reached a scripted engine, in a file that a test reads: what an attack made the engine do."""

import os
from collections.abc import Iterable
from pathlib import Path

PROMPT_LOG = "OCTAVO_TEST_PROMPT_LOG"  # in the environment: the file


class PromptLog:
    """The engine's side; None: no log."""

    def __init__(self, path: str | None) -> None:
        self._fd = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, token_ids: Iterable[int]) -> None:
        """One line for each prompt. Token ids below 256 are the bytes of the text."""
        if self._fd is not None:
            os.write(self._fd, bytes(token for token in token_ids if token < 256) + b"\n")


def read_prompt_log(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
