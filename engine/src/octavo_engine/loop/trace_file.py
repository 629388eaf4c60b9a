"""`TraceFile`: the file of `--trace`."""

import errno
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from octavo_engine.wire.errors import StartupError

logger = logging.getLogger(__name__)


class TraceFile:
    """A line-buffered file, so that a crash loses only the last line; mode 0600, because it holds prompts.

    If it can't grow, because the disk is full, it is closed and the engine continues without it.
    """

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o600)
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "it is a pipe, whose reader could stop the engine")
        except OSError as error:
            message = f"--trace: cannot write {path}: {error.strerror}: name a file that can be written."
            raise StartupError(message) from error
        self._path = path
        self._file: TextIO | None = os.fdopen(fd, "w", encoding="utf-8", buffering=1)

    def write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            logger.error("--trace: cannot write %s: %s; the trace ends here", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()
