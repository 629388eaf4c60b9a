"""`octavo route --workers N`: N worker processes on one port, each with its own index, and their supervisor.

The kernel distributes connections over the workers (SO_REUSEPORT). A worker that ends is restarted; if a worker ends
before any worker has started, the supervisor stops all. Each worker has its own session and doesn't get Ctrl-C from the
terminal: the supervisor forwards each signal to the workers. They exit when the supervisor exits for any reason.
"""

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from octavo_engine.process.exit_with_parent import exit_with_parent

from octavo_server.http.server import SIGNALS

logger = logging.getLogger("octavo")

VARIABLE = "OCTAVO_ROUTER_WORKER"
RESTART_DELAY_S = 1.0


class WorkerConfig(msgspec.Struct, frozen=True):
    """Settings that a worker gets from its supervisor. `folder`: folder for the Unix sockets of all workers."""

    number: int
    folder: str
    ports: list[int]
    pipe_fd: int
    parent_pid: int


def read_worker_config() -> WorkerConfig | None:
    """Return None if this process is not a worker, else its settings; then also make it exit with its supervisor."""
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    worker = msgspec.json.decode(text, type=WorkerConfig)
    exit_with_parent(worker.pipe_fd, worker.parent_pid, lambda: None)
    return worker


class WorkerSupervisor:
    """Starts and restarts the workers. `command`: starts one worker, whose settings an environment variable holds."""

    def __init__(self, command: Sequence[str], *, num_workers: int, ports: list[int]) -> None:
        self._command = command
        self._num_workers = num_workers
        self._ports = ports
        self._processes: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._has_started = False
        self._code = 0

    async def run(self) -> int:
        """Run the workers until all have ended; return the exit code."""
        loop = asyncio.get_running_loop()
        for sig in SIGNALS:
            loop.add_signal_handler(sig, partial(self._pass_on, sig))
        read_fd, write_fd = os.pipe()
        try:
            with tempfile.TemporaryDirectory(prefix="octavo-router-") as folder:
                workers = (self._keep(number, Path(folder), read_fd) for number in range(self._num_workers))
                await asyncio.gather(*workers)
        finally:
            os.close(read_fd)
            os.close(write_fd)
        return self._code

    async def _keep(self, number: int, folder: Path, pipe_fd: int) -> None:
        while not self._stopping.is_set():
            code = await self._run_once(WorkerConfig(number, str(folder), self._ports, pipe_fd, os.getpid()))
            self._has_started = self._has_started or any(folder.glob("*.sock"))
            if self._stopping.is_set():
                return
            if not self._has_started:
                self._code = code or 1
                self._pass_on(SIGNALS[0])
                return
            logger.error("worker %d ended with code %d; restarting it", number, code)
            await self._pause()

    async def _run_once(self, worker: WorkerConfig) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, VARIABLE: msgspec.json.encode(worker).decode()},
            pass_fds=(worker.pipe_fd,),
            start_new_session=True,
        )
        self._processes.add(process)
        try:
            return await process.wait()
        finally:
            self._processes.discard(process)

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RESTART_DELAY_S):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _pass_on(self, sig: int) -> None:
        self._stopping.set()
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(sig)


def worker_command() -> list[str]:
    """The command of this process, to run it in another process."""
    return [sys.executable, "-m", "octavo_server.cli.main", *sys.argv[1:]]
