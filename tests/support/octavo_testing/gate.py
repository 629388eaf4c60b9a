"""`Gate`: holds a scripted executor in another process inside a step until the test opens it, without a race.

A file lock: the test takes it first, the executor's step waits for it, and it is free once `open` was called.
"""

import fcntl
import os
from pathlib import Path
from typing import Any


class Gate:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def at(self, position: int) -> dict[str, Any]:
        """The part of a script that waits here before the output at `position`."""
        return {"wait_at": position, "gate": str(self._path)}

    def open(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def pass_gate(path: str) -> None:
    """The executor's side."""
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.close(fd)
