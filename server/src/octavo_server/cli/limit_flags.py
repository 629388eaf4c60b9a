"""Flags of `octavo serve` for access, limits of one request, the queue, connections and shutdown."""

from argparse import BooleanOptionalAction, Namespace
from typing import Any

from octavo_server.cli.declared_flags import add_flags, record_of
from octavo_server.cli.http_flags import (
    add_body_memory_flag,
    add_connection_flags,
    add_key_flags,
    add_lifecycle_flags,
)
from octavo_server.config import QueueLimits, RequestLimits


def add_limit_flags(parser: Any) -> None:
    keys = add_key_flags(parser)
    _add_isolation_flag(keys)
    _add_router_only_flag(keys)
    _add_request_flags(parser)
    add_flags(parser, QueueLimits)
    add_connection_flags(parser)
    add_lifecycle_flags(parser)


def _add_router_only_flag(group: Any) -> None:
    group.add_argument(
        "--router-only",
        action=BooleanOptionalAction,
        default=False,
        help="Reject every request without the router's secret, except probes and /metrics. Default: off.",
    )


def limits_of(args: Namespace) -> dict[str, Any]:
    """Arguments of `ServerConfig` that the flags of this module set."""
    return {
        "cache_isolation": args.cache_isolation,
        "max_body_memory_bytes": args.max_body_memory,
        "limits": record_of(RequestLimits, args),
        "queue": record_of(QueueLimits, args),
    }


def _add_isolation_flag(group: Any) -> None:
    group.add_argument(
        "--cache-isolation",
        action=BooleanOptionalAction,
        default=False,
        help="Separate prefix cache for each API key, so that no client can find out by timing which prompts another "
        "key has sent. Default: off.",
    )


def _add_request_flags(parser: Any) -> None:
    add_body_memory_flag(parser.add_argument_group("limits of one request"))
    add_flags(parser, RequestLimits)
