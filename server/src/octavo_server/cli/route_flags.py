"""Flags of `octavo route`. Those that `octavo serve` has, too, mean the same."""

import argparse
from typing import Any, get_args

from octavo_engine.log_format import LogFormat

from octavo_server.cli.discovery_flags import add_discovery_flags
from octavo_server.cli.flags import UVICORN_LOG_LEVELS
from octavo_server.cli.limit_flags import (
    LIMIT_HELP,
    add_connection_flags,
    add_key_flags,
    add_lifecycle_flags,
    add_request_timeout,
    keys_of,
    seconds,
)
from octavo_server.cli.sizes import size
from octavo_server.config import RequestLimits
from octavo_server.router.settings import ForwardLimits, RouterSettings

#: Field of ForwardLimits -> flag, how it is read, help.
FORWARD: dict[str, tuple[str, Any, str]] = {
    "connect_timeout_s": ("--connect-timeout", seconds, "seconds for a connection to a replica"),
    "first_byte_timeout_s": ("--first-byte-timeout", seconds, "seconds for an answer to begin, else 504"),
    "idle_timeout_s": ("--idle-timeout", seconds, "seconds of silence within an answer, after which it ends"),
    "max_retries": ("--max-retries", size, "times that a request is sent anew whose replica failed without an answer"),
    "max_requests_per_replica": ("--max-requests-per-replica", size, "requests at a replica; others wait here"),
    "max_queued_requests": ("--max-queued-reqs", size, "requests that wait here; beyond it 429"),
    "max_hold_s": ("--max-hold-time", seconds, "seconds that a request may wait here for a replica, else 503"),
    "breaker_failures": ("--breaker-failures", size, "failures in a row after which a replica is left alone"),
    "breaker_open_s": ("--breaker-open-time", seconds, "seconds of that, at first; doubled each time, up to 30"),
}


def add_route_flags(parser: argparse.ArgumentParser) -> None:
    _add_server_flags(parser)
    add_discovery_flags(parser)
    _add_replica_flags(parser)
    add_key_flags(parser)
    _add_forward_flags(parser)
    add_connection_flags(parser)
    add_lifecycle_flags(parser)


def settings_of(args: argparse.Namespace) -> RouterSettings:
    return RouterSettings(
        host=args.host,
        port=args.port,
        **keys_of(args),
        replica_key=args.replica_key,
        max_index_entries=args.max_index_entries,
        limits=RequestLimits(max_request_bytes=args.max_request_bytes, request_timeout_s=args.request_timeout),
        forward=ForwardLimits(**{name: getattr(args, name) for name in FORWARD}),
        log_format=args.log_format,
        logs_access=not args.disable_uvicorn_access_log,
        uvicorn_log_level=args.uvicorn_log_level,
        drain_timeout_s=args.drain_timeout,
        shutdown_delay_s=args.shutdown_delay,
        keep_alive_s=args.keep_alive_timeout,
        slow_client_timeout_s=args.slow_client_timeout,
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    defaults = RouterSettings()
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="HOST", help="address to listen on (default: all)")
    group.add_argument("--port", type=int, default=defaults.port, metavar="N", help="(default: 8000)")
    group.add_argument(
        "--workers",
        type=size,
        default=1,
        metavar="N",
        help="processes on this port, each with an index of its own; limits count for each (default: 1)",
    )
    level = defaults.uvicorn_log_level
    group.add_argument("--uvicorn-log-level", choices=UVICORN_LOG_LEVELS, default=level, help="(default: info)")
    group.add_argument("--log-format", choices=get_args(LogFormat), default=defaults.log_format, help="(default: text)")
    group.add_argument(
        "--disable-uvicorn-access-log",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no line for each HTTP request; probes and scrapes never get one (default: off)",
    )


def _add_replica_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    group.add_argument("--replica-key", default="", metavar="KEY", help="API key that replicas want (default: none)")
    entries = RouterSettings().max_index_entries
    group.add_argument(
        "--max-index-entries",
        type=size,
        default=entries,
        metavar="N",
        help=f"KV blocks that are known at most, about 110 bytes each (default: {entries})",
    )


def _add_forward_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests on their way")
    defaults, limits = ForwardLimits(), RequestLimits()
    for name, (flag, kind, text) in FORWARD.items():
        default = getattr(defaults, name)
        shown = "none" if default is None else f"{default:g}"
        group.add_argument(
            *(flag,), dest=name, type=kind, default=default, metavar="N", help=f"{text} (default: {shown})"
        )
    group.add_argument(
        "--max-request-bytes",
        type=size,
        default=limits.max_request_bytes,
        metavar="N",
        help=f"{LIMIT_HELP['max_request_bytes']} (default: {limits.max_request_bytes})",
    )
    add_request_timeout(group)
