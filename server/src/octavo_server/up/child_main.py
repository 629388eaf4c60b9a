"""Main module of the children of `octavo up`: runs an `octavo` command that does not outlive its parent.

`python -m octavo_server.up.child_main PARENT COMMAND ...`. The kernel kills the process when its parent exits for any
reason; each descendant watches its own parent and exits when that parent exits.
"""

import ctypes
import os
import signal
import sys

from octavo_server.cli.main import main

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before prctl took effect
        os._exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
