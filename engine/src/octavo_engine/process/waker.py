"""Wakes the core's loop from another thread: a pipe that the loop polls beside its inbox; for the process's life."""

import os
from contextlib import suppress


class Waker:
    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """From any thread. A pipe that is full wakes as well."""
        with suppress(BlockingIOError):
            os.write(self._write_fd, b"!")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)
