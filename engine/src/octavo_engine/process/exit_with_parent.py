"""Ends the engine core when its parent ends, however that happens. Three checks are combined, as each has a gap.

A thread waits for the end of the parent's pipe (a forked copy of the parent may hold the pipe open). The kernel signals
the parent's death (it also signals when only the starting *thread* ends, so the handler compares the parent's pid). The
core compares the pid once itself, in case the parent died before the other two checks were set up.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

PR_SET_PDEATHSIG = 1


def exit_with_parent(pipe_fd: int, parent_pid: int, on_orphaned: Callable[[], None]) -> None:
    """End this process with code 1 when its parent ends, after calling `on_orphaned`. Call it in the main thread."""

    def leave() -> None:
        on_orphaned()
        os._exit(1)

    def on_parent_signal(signum: int, frame: FrameType | None) -> None:
        if os.getppid() != parent_pid:
            leave()

    def read_until_closed() -> None:
        while os.read(pipe_fd, 4096):
            pass
        leave()

    signal.signal(signal.SIGUSR1, on_parent_signal)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    threading.Thread(target=read_until_closed, name="parent-pipe", daemon=True).start()
    if os.getppid() != parent_pid:
        leave()
