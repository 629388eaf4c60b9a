"""Flags of `octavo route`. A flag that `octavo serve` has too has the same meaning in both commands."""

import argparse
from pathlib import Path

from octavo_engine.settings.arg_types import positive_count
from octavo_engine.wire.errors import StartupError

from octavo_server.cli.declared_flags import add_flags, record_of
from octavo_server.cli.discovery import add_discovery_flags
from octavo_server.cli.http_flags import (
    add_address_flags,
    add_body_memory_flag,
    add_connection_flags,
    add_cors_flags,
    add_key_flags,
    add_lifecycle_flags,
    add_log_flags,
    add_traces_flag,
    http_settings_of,
    port,
)
from octavo_server.cli.secret_flags import add_admin_secret_flag, admin_secrets_of, checked
from octavo_server.config import BodyLimits
from octavo_server.router.settings import ForwardLimits, RouterSettings


def add_route_flags(parser: argparse.ArgumentParser) -> None:
    _add_server_flags(parser)
    add_discovery_flags(parser)
    _add_replica_flags(parser)
    add_admin_secret_flag(add_key_flags(parser))
    _add_forward_flags(parser)
    add_connection_flags(parser)
    add_lifecycle_flags(parser)


def settings_of(args: argparse.Namespace) -> RouterSettings:
    """`RouterSettings` from the flags. Raises StartupError for an invalid combination or an empty key."""
    if args.admin_port and args.admin_port == args.port:
        raise StartupError(f"--admin-port and --port are both {args.port}: give two different ports.")
    return RouterSettings(
        **http_settings_of(args),
        admin_port=args.admin_port,
        admin_secrets=admin_secrets_of(args),
        routing_headers=args.routing_headers,
        root_path=args.root_path.rstrip("/"),
        services_file=args.services_file,
        replica_key="".join(checked("--replica-key", () if args.replica_key is None else [args.replica_key])),
        max_index_entries=args.max_index_entries,
        limits=record_of(BodyLimits, args),
        max_body_memory_bytes=args.max_body_memory,
        forward=record_of(ForwardLimits, args),
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_address_flags(group)
    group.add_argument(
        "--admin-port",
        type=port,
        metavar="PORT",
        help="Second port on the same host; if it is given, /metrics and admin routes answer only there; 0: any free "
        "port. Default: none, so that all routes answer on --port.",
    )
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="Prefix that the paths of requests may have, such as /models if clients use http://HOST/models/v1; it is "
        "removed. Default: none.",
    )
    add_cors_flags(group)
    group.add_argument(
        "--workers",
        type=positive_count,
        default=1,
        metavar="N",
        help="Number of processes that share the port, each with its own index of KV blocks and its own limits. "
        "Default: 1.",
    )
    add_log_flags(group)
    add_traces_flag(group)


def _add_replica_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    group.add_argument("--replica-key", metavar="KEY", help="API key that the router sends to replicas. Default: none.")
    group.add_argument(
        "--services-file",
        type=Path,
        metavar="FILE",
        help="JSON file with all services behind the router and their models, read again when it changes: requests for "
        "a model without a replica wait, and other names get status 404 at once. Default: the models of the replicas.",
    )
    entries = RouterSettings().max_index_entries
    group.add_argument(
        "--max-index-entries",
        type=positive_count,
        default=entries,
        metavar="N",
        help="Largest number of KV blocks in the router's index, which takes about 110 bytes of memory for each. "
        f"Default: {entries}.",
    )


def _add_forward_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("forwarding of requests")
    add_body_memory_flag(group)
    add_flags(parser, ForwardLimits)
    add_flags(parser, BodyLimits)
    group.add_argument(
        "--routing-headers",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Send clients the response headers x-octavo-rung (basis of the routing decision), x-octavo-replica and "
        "x-octavo-cached-tokens, which reveal replicas and cache contents. Default: off.",
    )
