"""`Gate` and `Valve` hold a scripted executor in another process inside a step, without a race.

`Gate` is a file lock: the test holds it first, a step of the executor waits for it, and `open` releases it. `Valve` is
a FIFO from which each step reads a byte: the engine does as many steps as the test allows, and runs freely after
`open`.
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

    def wait_at(self, position: int) -> dict[str, Any]:
        """Return the part of a script that waits for the gate before the output at `position`."""
        return {"wait_at": position, "gate": str(self._path)}

    def open(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def pass_gate(path: str) -> None:
    """Wait for a gate; called by the executor."""
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.close(fd)


class Valve:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        os.mkfifo(path)
        self.shut()

    def allow_steps(self, times: int = 1) -> None:
        os.write(self._fd, bytes(times))

    def open(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def shut(self) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR)


class ValveReader:
    """The executor's side of a valve. A path of None means that steps run freely."""

    def __init__(self, path: str | None) -> None:
        self._fd = None if path is None else os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if self._fd is not None:
            os.set_blocking(self._fd, True)

    def wait_for_step(self) -> None:
        if self._fd is not None:
            os.read(self._fd, 1)
