"""Where the two processes meet: two ipc sockets in a private folder that lives only until both ends are connected.

A connected Unix socket needs its name no more. So the folder is removed as soon as the core has said hello: whatever
is killed afterwards, and how, nothing stale is left behind. Before that, the survivor removes it.
"""

import shutil
import tempfile
from pathlib import Path

MAX_FOLDER_CHARS = 90  # a socket's path may have 107 bytes


def make_folder() -> str:
    """Mode 0700, so that no other user connects; a long TMPDIR gives way to /tmp."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="octavo-", dir=base if len(base.encode()) <= MAX_FOLDER_CHARS - 20 else "/tmp")


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def to_core_address(folder: str) -> str:
    return f"ipc://{Path(folder) / 'in'}"


def from_core_address(folder: str) -> str:
    return f"ipc://{Path(folder) / 'out'}"
