"""Code blocks of the documents, and the command lines of a block."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_BLOCK = re.compile(r"^```(\S*).*\n((?:.*\n)*?)```$", re.MULTILINE)


@dataclass(frozen=True)
class PrintedBlock:
    """`line`: the number of its first line in the page, which is a path from the root."""

    page: str
    line: int
    language: str
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def printed_blocks(pages: Iterable[Path]) -> list[PrintedBlock]:
    return [
        PrintedBlock(str(path.relative_to(ROOT)), text.count("\n", 0, match.start()) + 2, match[1], match[2])
        for path in pages
        for text in [path.read_text()]
        for match in _BLOCK.finditer(text)
    ]


def logical_lines(body: str) -> Iterator[str]:
    """Lines joined while a quote is open or a backslash ends them."""
    pending = ""
    for line in body.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        try:
            shlex.split(pending, comments=True)
        except ValueError:
            continue
        yield pending
        pending = ""
    assert not pending, f"a quote is left open: {pending}"
