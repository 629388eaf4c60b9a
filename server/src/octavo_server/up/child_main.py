"""What `octavo up` starts: an `octavo` command in a process that doesn't outlive whoever started it.

`python -m octavo_server.up.child_main PARENT COMMAND ...`. The kernel kills it when its parent is gone, however that
ended; what it starts in turn ends with it by means of its own.
"""

import ctypes
import os
import signal
import sys

from octavo_server.cli.main import main

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before the kernel was told
        os._exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
