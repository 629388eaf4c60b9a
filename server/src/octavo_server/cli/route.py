"""`octavo route`: binds the port, discovers the replicas and forwards requests until a signal stops it.

`--workers N` starts N worker processes on one port, each with its own index, and their supervisor. The kernel
distributes connections over the workers (SO_REUSEPORT). A worker that ends is restarted; if a worker ends before any
worker has started, the supervisor stops all. Each worker has its own session and doesn't get Ctrl-C from the terminal:
the supervisor forwards each signal to the workers. They exit when the supervisor exits for any reason.
"""

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from octavo_engine.log_format import configure_logging
from octavo_engine.process.exit_with_parent import exit_with_parent

from octavo_server.access_log import skip_probes
from octavo_server.cli.banner import reachable_host
from octavo_server.cli.route_flags import discovery_of, settings_of
from octavo_server.cli.tracers import route_tracer_of
from octavo_server.http.listener import allow_connections, bind
from octavo_server.http.server import SIGNALS
from octavo_server.router.app import Router, RouterServer
from octavo_server.router.fleet.endpoint import Discovery
from octavo_server.router.observe.workers import WorkerGroup
from octavo_server.router.settings import RouterSettings

logger = logging.getLogger("octavo")

FILES_OF_CONNECTION = 2  # a client's connection, and the one to a replica for its request
WORKER_VARIABLE = "OCTAVO_ROUTER_WORKER"
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
    text = os.environ.pop(WORKER_VARIABLE, None)
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
            env={**os.environ, WORKER_VARIABLE: msgspec.json.encode(worker).decode()},
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


def route(args: argparse.Namespace) -> int:
    configure_logging(args.log_format, process="router")
    skip_probes()
    settings = settings_of(args)
    discovery = discovery_of(args)
    allowed = allow_connections(settings.max_connections, files_each=FILES_OF_CONNECTION)
    settings = replace(settings, max_connections=allowed)
    worker = read_worker_config()
    if worker is None:
        warn_about_open_replicas(settings)
    is_shared = settings.workers > 1
    with _bound(settings, worker, is_shared=is_shared) as sockets, _runner() as runner:
        ports = [sock.getsockname()[1] for sock in sockets]
        if is_shared and worker is None:  # the supervisor only reserves the ports, on which its workers listen
            logger.info("routing with %d worker processes", settings.workers)
            return runner.run(WorkerSupervisor(worker_command(), num_workers=settings.workers, ports=ports).run())
        admin_port = None if settings.admin_port is None else ports[1]
        runner.run(serve_router(replace(settings, admin_port=admin_port), discovery, sockets, worker))
    return 0


def _runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


@contextmanager
def _bound(settings: RouterSettings, worker: WorkerConfig | None, *, is_shared: bool) -> Iterator[list[socket.socket]]:
    """Bind the main port, then the admin port; a worker binds the ports that its supervisor has reserved. Raises
    StartupError if a port is in use."""
    ports = [settings.port] if settings.admin_port is None else [settings.port, settings.admin_port]
    with ExitStack() as stack:
        flags = ("--port", "--admin-port")
        yield [
            stack.enter_context(bind(settings.host, port, shared=is_shared, flag=flag))
            for port, flag in zip(ports if worker is None else worker.ports, flags, strict=False)
        ]


def warn_about_open_replicas(settings: RouterSettings) -> None:
    if settings.has_router_secret and not settings.needs_key:
        logger.warning(
            "clients need no API key, though the router's secret gives them access to replicas that require one: add "
            "--api-key or --api-key-file, unless every client that reaches this router may use the replicas"
        )


async def serve_router(
    settings: RouterSettings, discovery: Discovery, sockets: list[socket.socket], worker: WorkerConfig | None = None
) -> None:
    group = WorkerGroup() if worker is None else WorkerGroup(Path(worker.folder), worker.number)
    tracer = route_tracer_of(settings)
    router = Router(settings, discovery, group, tracer)
    server = RouterServer(router)
    await router.start()
    freeze_gc()
    try:
        host, port = reachable_host(settings.host), sockets[0].getsockname()[1]
        logger.info("routing at http://%s:%d/v1", host, port)
        if settings.admin_port is not None:
            logger.info("metrics and admin routes at http://%s:%d", host, settings.admin_port)
        await server.serve(sockets=sockets)
    finally:
        await router.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


def freeze_gc() -> None:
    """Exempt the objects allocated so far from garbage collection, and collect less often, to shorten its pauses."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
