"""`Child`: one process that `octavo up` started, and its descendants: output, exit and signals.

A child has its own process group. So Ctrl-C in the terminal reaches only the supervisor, which decides in which order
the children stop, and killing the group leaves no descendants.
"""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from octavo_server.up.console import Console, LineSplitter

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "octavo_server.up.child_main")
NUM_LAST_LINES = 12
READ_BYTES = 65536
OUTPUT_GRACE_S = 1.0  # seconds to read output after the child's exit: a descendant may hold the pipe open forever


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """A process to start. `args`: arguments of `octavo`. `env`: variables added to those of this process. `url`:
    address of the child's server."""

    name: str
    args: tuple[str, ...]
    url: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


class Child:
    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, console: Console) -> None:
        self.spec = spec
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._process = process
        self._console = console
        self.ended = asyncio.create_task(self._follow())

    @classmethod
    async def start(cls, spec: ChildSpec, console: Console) -> "Child":
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            str(os.getpid()),
            *spec.args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **spec.env},
        )
        return cls(spec, process, console)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_description(self) -> str:
        code = self._process.returncode
        assert code is not None, "the child has not ended"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def signal(self, sig: int) -> None:
        """Send a signal to the child's process only, which stops its own descendants."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                self._process.send_signal(sig)

    def kill(self) -> None:
        """Kill the child's process group: the child and its descendants."""
        if not self.ended.done():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _follow(self) -> int:
        output = asyncio.create_task(self._show_output())
        code = await self._process.wait()
        await asyncio.wait({output}, timeout=OUTPUT_GRACE_S)
        output.cancel()
        return code

    async def _show_output(self) -> None:
        assert self._process.stdout is not None
        lines = LineSplitter()
        while data := await self._process.stdout.read(READ_BYTES):
            for line in lines.feed(data):
                self._show(line)
        for line in lines.rest():
            self._show(line)

    def _show(self, line: str) -> None:
        self.last_lines.append(line)
        self._console.show(self.spec.name, line)
