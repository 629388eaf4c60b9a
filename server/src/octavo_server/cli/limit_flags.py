"""Flags of `octavo serve` for access, limits of one request, the queue, connections and shutdown."""

from argparse import BooleanOptionalAction, Namespace
from typing import Any

from octavo_engine.settings.arg_types import add_seconds, size_or_auto

from octavo_server.cli.declared_flags import add_flags, record_of
from octavo_server.cli.http_flags import (
    add_body_memory_flag,
    add_connection_flags,
    add_key_flags,
    add_lifecycle_flags,
)
from octavo_server.config import QueueLimits, RequestLimits

#: Field of QueueLimits -> help.
QUEUE_HELP = {
    "max_num_queued_reqs": "Largest number of waiting and running sequences of all requests together; -1: no limit.",
    "max_num_queued_tokens": "Number of prompt tokens of waiting requests from which on new requests are rejected.",
    "max_requests_per_key": "Number of one API key's waiting and running sequences from which on its new requests are "
    "rejected.",
}


def add_limit_flags(parser: Any) -> None:
    keys = add_key_flags(parser)
    _add_isolation_flag(keys)
    _add_router_only_flag(keys)
    _add_request_flags(parser)
    _add_queue_flags(parser)
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
        "queue": QueueLimits(
            max_queue_time_s=args.max_queue_time, **{name: getattr(args, name) for name in QUEUE_HELP}
        ),
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


def _add_queue_flags(parser: Any) -> None:
    group = parser.add_argument_group("queue", "A request beyond these limits gets status 429 with Retry-After.")
    defaults = QueueLimits()
    for name, text in QUEUE_HELP.items():
        default = getattr(defaults, name)
        shown = "none" if default is None else default
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=size_or_auto, default=default, metavar="N", help=f"{text} Default: {shown}.")
    text = "Seconds after which a request that still waits in the queue gets status 503."
    add_seconds(group, "--max-queue-time", text, default=None)
