"""The flags of `octavo serve` about who may ask, how much, and how the server ends."""

from argparse import BooleanOptionalAction, Namespace
from typing import Any

from octavo_server.cli.arg_types import add_seconds, size, size_or_auto
from octavo_server.cli.http_flags import (
    add_body_memory_flag,
    add_connection_flags,
    add_key_flags,
    add_lifecycle_flags,
    add_request_timeout,
)
from octavo_server.config import QueueLimits, RequestLimits

#: Field of RequestLimits -> help.
LIMIT_HELP = {
    "max_request_bytes": "bytes of a request body; accepts 32M",
    "max_json_values": "values in the JSON of a request body: numbers, texts, lists, objects",
    "max_json_depth": "nested levels of a request body",
    "max_messages": "messages of a conversation",
    "max_content_parts": "content parts of all messages together",
    "max_tools": "tools of one request",
    "max_prompts": "prompts of one completion request",
    "max_prompt_chars": "characters of a text to be tokenised, whatever the context holds",
    "max_n": "sequences per prompt",
    "max_stop_strings": "stop strings",
    "max_stop_chars": "characters of one stop string or bad word",
    "max_stop_token_ids": "entries of stop_token_ids",
    "max_bad_words": "entries of bad_words",
    "max_logit_bias": "entries of logit_bias",
    "max_allowed_token_ids": "entries of allowed_token_ids",
}
#: Field of QueueLimits -> help.
QUEUE_HELP = {
    "max_num_queued_reqs": "requests waiting and running, one with n counts n; -1: no bound",
    "max_num_queued_tokens": "prompt tokens of the requests that have no output yet",
    "max_requests_per_key": "requests waiting and running of one API key",
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
        help="refuse every request without the router's secret, but for probes and /metrics (default: off)",
    )


def limits_of(args: Namespace) -> dict[str, Any]:
    """The fields of `ServerConfig` that these flags set."""
    return {
        "cache_isolation": args.cache_isolation,
        "max_body_memory_bytes": args.max_body_memory,
        "limits": RequestLimits(
            request_timeout_s=args.request_timeout, **{name: getattr(args, name) for name in LIMIT_HELP}
        ),
        "queue": QueueLimits(
            max_queue_time_s=args.max_queue_time, **{name: getattr(args, name) for name in QUEUE_HELP}
        ),
    }


def _add_isolation_flag(group: Any) -> None:
    group.add_argument(
        "--cache-isolation",
        action=BooleanOptionalAction,
        default=False,
        help="a prefix cache of its own for each key, so that no key can probe another's prompts (default: off)",
    )


def _add_request_flags(parser: Any) -> None:
    group = parser.add_argument_group("limits of one request")
    defaults = RequestLimits()
    for name, text in LIMIT_HELP.items():
        default = getattr(defaults, name)
        group.add_argument(
            "--" + name.replace("_", "-"), type=size, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    add_body_memory_flag(group)
    add_request_timeout(group)


def _add_queue_flags(parser: Any) -> None:
    group = parser.add_argument_group("queue", "Beyond these a request is refused with 429 and Retry-After.")
    defaults = QueueLimits()
    for name, text in QUEUE_HELP.items():
        default = getattr(defaults, name)
        shown = "none" if default is None else default
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=size_or_auto, default=default, metavar="N", help=f"{text} (default: {shown})")
    text = "seconds that a request may wait to be started, else it ends with 503"
    add_seconds(group, "--max-queue-time", text, default=None)
