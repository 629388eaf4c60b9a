"""A command at a pseudo-terminal: a test types, reads the output and presses Ctrl-C as a person does."""

import asyncio
import os
import pty
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import psutil

CTRL_C, CTRL_D, UP = b"\x03", b"\x04", b"\x1b[A"

#: Makes the terminal the controlling one, so that Ctrl-C becomes a signal, handles SIGINT again, which background jobs
#: ignore, and executes the command.
_LAUNCH = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
_ESCAPES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Terminal:
    def __init__(self, descriptor: int, process: asyncio.subprocess.Process) -> None:
        self._descriptor = descriptor
        self._process = process
        self._arrived = asyncio.Event()
        self._output = b""
        self._seen = 0
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            piece = os.read(self._descriptor, 65536)
        except OSError:  # the other side is closed
            piece = b""
        if not piece:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._output += piece
        self._arrived.set()

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._output.decode(errors="replace")).replace("\r\n", "\n")

    async def until(self, expected: str, timeout_s: float = 240) -> str:
        """Wait for `expected` and return the output since the last call, up to its end."""
        try:
            async with asyncio.timeout(timeout_s):
                while (found := self.text.find(expected, self._seen)) < 0:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(f"{expected!r} did not appear; the terminal shows:\n{self.text}") from None
        start, self._seen = self._seen, found + len(expected)
        return self.text[start : self._seen]

    def type(self, text: str) -> None:
        self.press(text.encode() + b"\n")

    def press(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    async def interrupt(self) -> None:
        """Press Ctrl-C when the command waits for keys: readline loses a signal that arrives while it handles a key."""
        while psutil.Process(self._process.pid).status() != psutil.STATUS_SLEEPING:
            await asyncio.sleep(0.005)
        self.press(CTRL_C)

    async def exit_code(self, timeout_s: float = 240) -> int:
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


@asynccontextmanager
async def terminal(*argv: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", **(env or {})}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LAUNCH, sys.executable, *argv),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    shown = Terminal(master, process)
    try:
        yield shown
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        shown.close()
