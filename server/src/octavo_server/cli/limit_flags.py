"""Flags of `octavo serve` for access, limits of one request, the queue, connections and shutdown."""

from argparse import BooleanOptionalAction, Namespace
from typing import Any

from octavo_server.cli.arg_types import add_seconds, size, size_or_auto
from octavo_server.cli.http_flags import (
    add_body_memory_flag,
    add_connection_flags,
    add_key_flags,
    add_lifecycle_flags,
    add_upload_flags,
    upload_limits_of,
)
from octavo_server.config import QueueLimits, RequestLimits

#: Field of RequestLimits -> help.
LIMIT_HELP = {
    "max_request_bytes": "Largest number of bytes of a request body; accepts 32M.",
    "max_json_values": "Largest number of JSON values (numbers, strings, lists, objects) in a request body, and of "
    "sequences times entries and characters in stop, bad_words, logit_bias and other lists.",
    "max_json_depth": "Largest number of nested JSON levels in a request body.",
    "max_messages": "Largest number of messages of a chat request.",
    "max_content_parts": "Largest number of content parts of all messages of a chat request together.",
    "max_tools": "Largest number of tools of a request.",
    "max_prompts": "Largest number of prompts of a completion request, or of documents of a rerank request.",
    "max_prompt_chars": "Largest number of characters of a text to tokenise, independent of the context length.",
    "max_n": "Largest n, the number of sequences per prompt.",
    "max_stop_strings": "Largest number of stop strings of a request.",
    "max_stop_chars": "Largest number of characters of a stop string or bad word.",
    "max_stop_strings_chars": "Largest number of characters of all stop strings of a request together.",
    "max_stop_token_ids": "Largest number of entries of stop_token_ids.",
    "max_bad_words": "Largest number of entries of bad_words.",
    "max_bad_words_chars": "Largest number of characters of all bad words of a request together.",
    "max_logit_bias": "Largest number of entries of logit_bias.",
    "max_allowed_token_ids": "Largest number of entries of allowed_token_ids.",
}
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
        "limits": RequestLimits(**upload_limits_of(args), **{name: getattr(args, name) for name in LIMIT_HELP}),
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
    group = parser.add_argument_group("limits of one request")
    defaults = RequestLimits()
    for name, text in LIMIT_HELP.items():
        default = getattr(defaults, name)
        group.add_argument(
            "--" + name.replace("_", "-"), type=size, default=default, metavar="N", help=f"{text} Default: {default}."
        )
    add_body_memory_flag(group)
    add_upload_flags(group)


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
