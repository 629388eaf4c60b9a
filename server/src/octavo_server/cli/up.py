"""`octavo up MODEL --replicas N`: runs several engines on this machine and a router in front of them.

Engines listen only on the loopback address. If API keys are required, each start generates a secret, by which engines
accept the router's requests and tenants. The arguments of engines are checked once; each engine then gets them as the
user typed them.
"""

import argparse
import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import uvloop
from octavo_engine.devices.cgroup import read_limits
from octavo_engine.log_format import JsonFormatter, TextFormatter
from octavo_engine.settings.config import EngineConfig, num_ranks
from octavo_engine.wire.errors import StartupError

from octavo_server.cli.banner import CHAT, EMBEDDINGS, example_command
from octavo_server.cli.config_file import CONFIG_FLAG
from octavo_server.cli.declared_flags import add_flags, flags_of
from octavo_server.cli.flags import UpFlags
from octavo_server.cli.serve import engine_config_of, server_config_of
from octavo_server.cli.up_manifest import ManifestServices, parse_service, read_manifest, write_key_files
from octavo_server.config import HttpSettings, ServerConfig, TlsSettings
from octavo_server.http.listener import LOOPBACK, ReservedPorts
from octavo_server.up.console import Console
from octavo_server.up.plan import EngineOptions, Plan, UpOptions, plan_children
from octavo_server.up.resource_split import GPU_VARIABLE, MachineResources, split_resources
from octavo_server.up.supervisor import Supervisor, UpLimits

SECRET_BYTES = 32
UP = "up"
#: Seconds after the drain timeout (or the shutdown delay, if longer) until a process that still runs is killed.
STOP_MARGIN_S = 10.0

logger = logging.getLogger("octavo.up")


@dataclass(frozen=True, slots=True)
class StartupSummary:
    """Contents of the log: `notes` are logged at the start, the other fields once all engines serve."""

    models: tuple[str, ...]
    needs_key: bool
    notes: tuple[str, ...] = ()
    runner: str = "auto"  # of the first model


def up(args: argparse.Namespace) -> int:
    with ExitStack() as stack:
        ports = stack.enter_context(ReservedPorts())
        options, summary = (_options_from_flags if args.file is None else _options_from_manifest)(args, ports, stack)
        plan = plan_children(options)
        console = Console(sys.stderr, [*plan.names, UP], has_colour=has_colour())
        _log_to(console, args)
        for note in summary.notes:
            logger.info("%s", note)
        return _run(plan, console, summary, args)


def _options_from_flags(
    args: argparse.Namespace, ports: ReservedPorts, _: ExitStack
) -> tuple[UpOptions, StartupSummary]:
    engine = engine_config_of(args)
    config = server_config_of(args, engine)
    check(args, config, engine)
    summary = StartupSummary((config.model_name,), config.needs_key, runner=engine.runner)
    return _options(args, ports, _replicas(args, engine, ports), needs_key=config.needs_key), summary


def check(args: argparse.Namespace, config: ServerConfig, engine: EngineConfig) -> None:
    """Raises StartupError for arguments that `octavo up` sets itself, or that several engines can't share."""
    if engine.nnodes > 1:
        raise StartupError("octavo up runs engines on one machine: leave out --nnodes, or start octavo serve per host.")
    if config.has_router_secret:
        raise StartupError(
            "octavo up generates the router's secret itself: leave out --router-secret and $OCTAVO_ROUTER_SECRET."
        )
    if config.uds is not None or config.tls != TlsSettings():
        raise StartupError(
            "--uds and --ssl-* are for one server, and octavo up starts several behind a router: leave them out, and "
            "end TLS in a proxy."
        )
    if args.trace is not None and args.replicas > 1:
        raise StartupError(
            "--trace needs a single engine, as each replica would overwrite the file: use octavo serve or --replicas 1."
        )


def _options(
    args: argparse.Namespace, ports: ReservedPorts, engines: Iterator[EngineOptions], *key_flags: str, needs_key: bool
) -> UpOptions:
    """Reserve the router's port before the ports of `engines`, so that a port in use is reported at once."""
    port = ports.reserve(args.host, args.port)
    return UpOptions(
        engines=tuple(engines),
        route_args=(*route_args(args), *key_flags, *args.router_args),
        host=args.host,
        port=port,
        secret=secrets.token_urlsafe(SECRET_BYTES) if needs_key else "",
    )


def _replicas(args: argparse.Namespace, engine: EngineConfig, ports: ReservedPorts) -> Iterator[EngineOptions]:
    share = split_resources(engine, this_machine(), [num_ranks(engine)] * args.replicas)
    for position in range(args.replicas):
        port = ports.reserve(LOOPBACK, 0)
        yield EngineOptions(
            name=f"replica-{position}", args=serve_args(args.typed), port=port, position=position, share=share
        )


def _options_from_manifest(
    args: argparse.Namespace, ports: ReservedPorts, stack: ExitStack
) -> tuple[UpOptions, StartupSummary]:
    fleet = read_manifest(args)
    args.drain_timeout = fleet.drain_timeout_s
    key_flags = write_key_files(fleet, stack)
    needs_key = bool(key_flags or args.api_key_file)
    engines = manifest_engines(fleet, this_machine(), args.log_format, ports)
    options = _options(args, ports, engines, *key_flags, needs_key=needs_key)
    serving = [service for service in fleet.services if service.replicas]
    names = tuple(service.served_names[0] for service in serving)
    return options, StartupSummary(names, needs_key, fleet.notes, parse_service(serving[0]).runner)


def manifest_engines(
    fleet: ManifestServices, machine: MachineResources, log_format: str, ports: ReservedPorts
) -> Iterator[EngineOptions]:
    positions = count()
    services = [(service, parse_service(service)) for service in fleet.services]
    ranks = [num_ranks(engine) for service, engine in services for _ in range(service.replicas)]
    for service, engine in services:
        share = split_resources(engine, machine, ranks)
        for number in range(service.replicas):
            yield EngineOptions(
                name=f"{service.name}-{number}",
                args=(*service.args, "--log-format", log_format),
                port=ports.reserve(LOOPBACK, 0),
                position=next(positions),
                share=share,
                env=service.env,
            )


def serve_args(typed: Sequence[str]) -> tuple[str, ...]:
    """Arguments for each engine: `typed` without the flags of `octavo up` itself, --host, --port and --config."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(own, UpFlags)
    for flag in ("--host", "--port", CONFIG_FLAG):
        own.add_argument(flag)
    return tuple(own.parse_known_args(typed)[1])


def route_args(args: argparse.Namespace) -> list[str]:
    """Arguments for the router: those settings of `octavo up` that servers and routers share."""
    return list(flags_of(HttpSettings, args, but=("host", "port", "router_secret", "router_secret_file")))


def this_machine() -> MachineResources:
    return MachineResources(
        env=os.environ,
        affinity=frozenset(os.sched_getaffinity(0)),
        limits=read_limits(),
        gpus=visible_gpus(os.environ, Path("/dev")),
    )


def visible_gpus(env: Mapping[str, str], devices: Path) -> tuple[str, ...]:
    """Return the names of the GPUs that `CUDA_VISIBLE_DEVICES` allows, or numbers of those that have a device file."""
    if GPU_VARIABLE in env:
        return tuple(name for name in env[GPU_VARIABLE].split(",") if name and name != "-1")
    gpus = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return tuple(map(str, range(len(gpus))))


def has_colour() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


class _ConsoleHandler(logging.Handler):
    """Shows the log lines of this process, the supervisor, on the console under the name `up`."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self._console.show(UP, line)


def _log_to(console: Console, args: argparse.Namespace) -> None:
    handler = _ConsoleHandler(console)
    handler.setFormatter(JsonFormatter(UP) if args.log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _run(plan: Plan, console: Console, summary: StartupSummary, args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    addresses = ", ".join(f"{replica.name} at {replica.url.partition('//')[2]}" for replica in plan.replicas)
    count = "1 replica" if len(plan.replicas) == 1 else f"{len(plan.replicas)} replicas"
    logger.info("starting the router and %s (%s)", count, addresses)

    def on_serving() -> None:
        url, models = plan.router.url, " and ".join(summary.models)
        took_s = time.monotonic() - started_s
        serve = "serves" if len(plan.replicas) == 1 else "serve"
        logger.info("%s %s %s at %s/v1 after %.1f s", count, serve, models, url, took_s)
        route = EMBEDDINGS if summary.runner == "pooling" else CHAT
        logger.info(example_command(summary.models[0], url, route=route, needs_key=summary.needs_key))
        logger.info("Ctrl-C stops all processes; to see routing decisions: octavo explain decisions --url %s", url)

    stop_s = max(args.drain_timeout, args.shutdown_delay) + STOP_MARGIN_S
    supervisor = Supervisor(plan, console, UpLimits(stop_s=stop_s), on_serving=on_serving)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(supervisor.run())
