"""`octavo route`: binds the port, discovers the replicas and forwards requests until a signal stops it."""

import argparse
import asyncio
import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import uvloop
from octavo_engine.log_format import configure_logging

from octavo_server.access_log import skip_probes
from octavo_server.cli.banner import reachable_host
from octavo_server.cli.discovery import discovery_of
from octavo_server.cli.route_flags import settings_of
from octavo_server.cli.route_workers import WorkerConfig, WorkerSupervisor, read_worker_config, worker_command
from octavo_server.cli.tracers import route_tracer_of
from octavo_server.http.listener import allow_connections, bind
from octavo_server.router.app import Router, RouterServer
from octavo_server.router.fleet.endpoint import Discovery
from octavo_server.router.observe.workers import WorkerGroup
from octavo_server.router.settings import RouterSettings

logger = logging.getLogger("octavo")

FILES_OF_CONNECTION = 2  # a client's connection, and the one to a replica for its request


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
            return runner.run(_supervise(settings.workers, ports))
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


async def _supervise(num_workers: int, ports: list[int]) -> int:
    return await WorkerSupervisor(worker_command(), num_workers=num_workers, ports=ports).run()


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
