"""`octavo route`: take the port, follow the replicas, send requests on until told to stop."""

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys

import uvloop
from octavo_engine.log_format import configure_logging
from octavo_engine.wire.errors import StartupError

from octavo_server.access_log import skip_probes
from octavo_server.cli.banner import reachable
from octavo_server.cli.discovery import discovery_of
from octavo_server.cli.route_flags import settings_of
from octavo_server.http.listener import allow_many_connections, bind, cannot_listen
from octavo_server.router.app import Router
from octavo_server.router.endpoint import Discovery
from octavo_server.router.server import RouterServer
from octavo_server.router.settings import RouterSettings

logger = logging.getLogger("octavo")


def route(args: argparse.Namespace) -> int:
    configure_logging(args.log_format, process="router")
    skip_probes()
    try:
        settings = settings_of(args)
        discovery = discovery_of(args)
        allow_many_connections()
        with bind(settings.host, settings.port) as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_router(settings, discovery, sock))
        return 0
    except StartupError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def serve_router(settings: RouterSettings, discovery: Discovery, sock: socket.socket) -> None:
    router = Router(settings, discovery)
    server = RouterServer(router)
    await router.start()
    _settle_memory()
    try:
        port = sock.getsockname()[1]
        logger.info("routing at http://%s:%d/v1", reachable(settings.host), port)
        await server.serve(sockets=[sock])
    except OSError as error:
        raise cannot_listen(settings.host, settings.port, error) from error
    finally:
        await router.stop()


def _settle_memory() -> None:
    """What is there by now stays: the collector needn't look at it again, and at requests only now and then."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
