"""`octavo route`: take the port, follow the replicas, send requests on until told to stop."""

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
from pathlib import Path

import uvloop
from octavo_engine.log_format import configure_logging
from octavo_engine.wire.errors import StartupError

from octavo_server.access_log import skip_probes
from octavo_server.cli.banner import reachable
from octavo_server.cli.discovery import discovery_of
from octavo_server.cli.observe_flags import route_tracer_of
from octavo_server.cli.route_flags import settings_of
from octavo_server.cli.route_workers import Place, Supervisor, take_place, worker_command
from octavo_server.http.listener import allow_many_connections, bind, cannot_listen
from octavo_server.router.app import Router
from octavo_server.router.fleet.endpoint import Discovery
from octavo_server.router.server import RouterServer
from octavo_server.router.settings import RouterSettings
from octavo_server.router.worker_group import WorkerGroup

logger = logging.getLogger("octavo")


def route(args: argparse.Namespace) -> int:
    configure_logging(args.log_format, process="router")
    skip_probes()
    try:
        settings = settings_of(args)
        discovery = discovery_of(args)
        allow_many_connections()
        place = take_place()
        is_shared, port = args.workers > 1, place.port if place else settings.port
        with bind(settings.host, port, shared=is_shared) as sock, _runner() as runner:
            if is_shared and place is None:  # it only holds the port
                logger.info("routing with %d workers", args.workers)
                port = sock.getsockname()[1]
                return runner.run(_supervise(args.workers, port))
            runner.run(serve_router(settings, discovery, sock, place))
        return 0
    except StartupError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _supervise(num_workers: int, port: int) -> int:
    return await Supervisor(worker_command(), num_workers=num_workers, port=port).run()


async def serve_router(
    settings: RouterSettings, discovery: Discovery, sock: socket.socket, place: Place | None = None
) -> None:
    group = WorkerGroup() if place is None else WorkerGroup(Path(place.folder), place.number)
    tracer = route_tracer_of(settings)
    router = Router(settings, discovery, group, tracer)
    server = RouterServer(router)
    await router.start()
    settle_memory()
    try:
        port = sock.getsockname()[1]
        logger.info("routing at http://%s:%d/v1", reachable(settings.host), port)
        await server.serve(sockets=[sock])
    except OSError as error:
        raise cannot_listen(settings.host, settings.port, error) from error
    finally:
        await router.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


def settle_memory() -> None:
    """What is there by now stays: the collector needn't look at it again, and at requests only now and then."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
