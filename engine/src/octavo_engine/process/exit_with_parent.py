"""The core must not outlive its parent, however that ends. Three ways to notice, as each has a hole.

A thread waits for the end of the parent's pipe (a forked copy of the parent may hold it open), the kernel signals the
parent's death (it also does so when merely the starting *thread* ends, hence the look at the parent's pid), and the
core looks once itself, in case the parent died before either was in place.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

PR_SET_PDEATHSIG = 1


def exit_with_parent(pipe_fd: int, parent_pid: int, on_orphaned: Callable[[], None]) -> None:
    """From here on the process ends with its parent, after `on_orphaned` has tidied up. Main thread only."""

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
