"""Flags of `octavo route`. Those that `octavo serve` has, too, mean the same."""

import argparse
from typing import Any

from octavo_engine.wire.errors import StartupError

from octavo_server.cli.arg_types import positive_count, positive_seconds, seconds, size
from octavo_server.cli.discovery import add_discovery_flags
from octavo_server.cli.http_flags import (
    add_address_flags,
    add_body_memory_flag,
    add_connection_flags,
    add_key_flags,
    add_lifecycle_flags,
    add_log_flags,
    add_origins_flag,
    add_request_timeout,
    add_traces_flag,
    http_settings_of,
    port,
)
from octavo_server.cli.limit_flags import LIMIT_HELP
from octavo_server.cli.secret_flags import checked
from octavo_server.config import RequestLimits
from octavo_server.router.settings import ForwardLimits, RouterSettings

#: The limits of one request that a router checks itself.
BODY_LIMITS = ("max_request_bytes", "max_json_values", "max_json_depth")
#: Field of ForwardLimits -> flag, how it is read, help.
FORWARD: dict[str, tuple[str, Any, str]] = {
    "connect_timeout_s": ("--connect-timeout", positive_seconds, "seconds for a connection to a replica"),
    "first_byte_timeout_s": ("--first-byte-timeout", positive_seconds, "seconds for an answer to begin, else 504"),
    "idle_timeout_s": ("--idle-timeout", positive_seconds, "seconds of silence within an answer, after which it ends"),
    "max_retries": ("--max-retries", size, "times that a request is sent anew whose replica failed without an answer"),
    "max_requests_per_replica": (
        "--max-requests-per-replica",
        positive_count,
        "requests at a replica; others wait here",
    ),
    "max_queued_requests": ("--max-queued-reqs", size, "requests that wait here; beyond it 429"),
    "max_hold_s": ("--max-hold-time", seconds, "seconds that a request may wait here for a replica, else 503"),
    "breaker_failures": ("--breaker-failures", positive_count, "failures in a row after which a replica is left alone"),
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
    """Raises StartupError."""
    if args.admin_port and args.admin_port == args.port:
        raise StartupError(f"--admin-port and --port are both {args.port}: give two different ports.")
    return RouterSettings(
        **http_settings_of(args),
        admin_port=args.admin_port,
        routing_headers=args.routing_headers,
        replica_key="".join(checked("--replica-key", () if args.replica_key is None else [args.replica_key])),
        max_index_entries=args.max_index_entries,
        limits=RequestLimits(
            request_timeout_s=args.request_timeout, **{name: getattr(args, name) for name in BODY_LIMITS}
        ),
        max_body_memory_bytes=args.max_body_memory,
        forward=ForwardLimits(**{name: getattr(args, name) for name in FORWARD}),
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_address_flags(group)
    group.add_argument(
        "--admin-port",
        type=port,
        metavar="PORT",
        help="second port on the same host, where alone /metrics and the routes of administrators answer; 0: a free "
        "one (default: none, all routes answer on --port)",
    )
    add_origins_flag(group)
    group.add_argument(
        "--workers",
        type=positive_count,
        default=1,
        metavar="N",
        help="processes on this port, each with an index of its own; limits count for each (default: 1)",
    )
    add_log_flags(group)
    add_traces_flag(group)


def _add_replica_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    group.add_argument("--replica-key", metavar="KEY", help="API key that replicas want (default: none)")
    entries = RouterSettings().max_index_entries
    group.add_argument(
        "--max-index-entries",
        type=positive_count,
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
    for name in BODY_LIMITS:
        flag, default = "--" + name.replace("_", "-"), getattr(limits, name)
        help_text = f"{LIMIT_HELP[name]} (default: {default})"
        group.add_argument(flag, type=size, default=default, metavar="N", help=help_text)
    add_body_memory_flag(group)
    add_request_timeout(group)
    group.add_argument(
        "--routing-headers",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="x-octavo-rung, x-octavo-replica and x-octavo-cached-tokens in answers to clients: they show the names of "
        "replicas and what was cached (default: off)",
    )
