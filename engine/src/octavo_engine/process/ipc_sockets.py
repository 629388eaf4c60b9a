"""The folder of the two ipc sockets between API and core process; a pipe that wakes a loop which polls sockets.

A connected Unix socket no longer needs its path. So the folder is removed once the core has sent `Hello`: no stale file
remains, however the processes end afterwards. If one process ends before, the other removes it.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from octavo_engine.wire.errors import StartupError

MAX_FOLDER_CHARS = 90  # a socket's path may have 107 bytes


class Waker:
    """A pipe that a loop polls in addition to its sockets, so that other threads can wake the loop."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """Wake the loop, from any thread. A full pipe wakes the loop as well."""
        with suppress(BlockingIOError):
            os.write(self._write_fd, b"!")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)


def make_folder() -> str:
    """Create the folder with mode 0700, so that no other user connects; in /tmp if TMPDIR's path is too long.

    Raises StartupError if no folder for temporary files is writable, as on a read-only root without /tmp.
    """
    try:
        base = tempfile.gettempdir()
        return tempfile.mkdtemp(prefix="octavo-", dir=base if len(base.encode()) <= MAX_FOLDER_CHARS - 20 else "/tmp")
    except OSError as error:
        raise StartupError(
            f"the sockets of the engine core need a writable folder for temporary files: {error}: make /tmp writable "
            f"(in Kubernetes: mount an emptyDir), or set TMPDIR."
        ) from error


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def to_core_address(folder: str) -> str:
    return f"ipc://{Path(folder) / 'in'}"


def from_core_address(folder: str) -> str:
    return f"ipc://{Path(folder) / 'out'}"
