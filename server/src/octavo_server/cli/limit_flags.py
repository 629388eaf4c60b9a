"""The flags of `octavo serve` about who may ask, how much, and how the server ends."""

import os
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from octavo_server.cli.secret_flags import add_secret_flags, secrets_of
from octavo_server.cli.sizes import size, size_or_auto
from octavo_server.config import QueueLimits, RequestLimits

KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY")

#: Field of RequestLimits -> help.
LIMIT_HELP = {
    "max_request_bytes": "bytes of a request body; accepts 32M",
    "max_json_depth": "nested levels of a request body",
    "max_messages": "messages of a conversation",
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
    _add_isolation_flag(add_key_flags(parser))
    _add_request_flags(parser)
    _add_queue_flags(parser)
    add_connection_flags(parser)
    add_lifecycle_flags(parser)


def limits_of(args: Namespace) -> dict[str, Any]:
    """The fields of `ServerConfig` that these flags set."""
    return {
        **keys_of(args),
        "cache_isolation": args.cache_isolation,
        "limits": RequestLimits(
            request_timeout_s=args.request_timeout, **{name: getattr(args, name) for name in LIMIT_HELP}
        ),
        "queue": QueueLimits(
            max_queue_time_s=args.max_queue_time, **{name: getattr(args, name) for name in QUEUE_HELP}
        ),
        "keep_alive_s": args.keep_alive_timeout,
        "slow_client_timeout_s": args.slow_client_timeout,
        "drain_timeout_s": args.drain_timeout,
        "shutdown_delay_s": args.shutdown_delay,
    }


def keys_of(args: Namespace) -> dict[str, Any]:
    keys = args.api_key or [key for name in KEY_VARIABLES if (key := os.environ.get(name))]
    return {
        "api_keys": tuple(dict.fromkeys(keys)),
        "api_key_files": tuple(args.api_key_file or ()),
        **secrets_of(args),
    }


def add_key_flags(parser: Any) -> Any:
    """The group of flags."""
    group = parser.add_argument_group("API keys")
    group.add_argument(
        *("--api-key",),
        nargs="+",
        action="extend",
        metavar="KEY",
        help="keys that clients must send (default: $OCTAVO_API_KEY or $VLLM_API_KEY, else none is needed)",
    )
    group.add_argument(
        *("--api-key-file",),
        nargs="+",
        action="extend",
        type=Path,
        metavar="PATH",
        help="named keys: a file of `name: key` lines, or a folder with one file a key, as Kubernetes mounts a Secret; "
        "read again when it changes (default: none)",
    )
    add_secret_flags(group)
    return group


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
    add_request_timeout(group)


def add_request_timeout(group: Any) -> None:
    text = "seconds for a client to send the head of a request, and again for its body"
    add_seconds(group, "--request-timeout", text, default=RequestLimits().request_timeout_s)


def add_connection_flags(parser: Any) -> None:
    group = parser.add_argument_group("connections")
    group.add_argument(
        "--keep-alive-timeout",
        type=whole_seconds,
        default=120,
        metavar="S",
        help="seconds that an idle connection stays open: more than proxies keep theirs (default: 120)",
    )
    text = "seconds after which a client that doesn't read its answer is cut off"
    add_seconds(group, "--slow-client-timeout", text, default=60.0)


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


def add_lifecycle_flags(parser: Any) -> None:
    group = parser.add_argument_group("shutdown")
    text = "seconds that running requests have to finish after SIGTERM or POST /drain"
    add_seconds(group, "--drain-timeout", text, default=30.0)
    text = (
        "seconds to go on answering 503 after SIGTERM though nothing runs, until proxies have noticed; Ctrl-C doesn't "
        "wait"
    )
    add_seconds(group, "--shutdown-delay", text, default=0.0)


def add_seconds(group: Any, flag: str, text: str, *, default: float | None) -> None:
    shown = "none" if default is None else f"{default:g}"
    group.add_argument(flag, type=seconds, default=default, metavar="S", help=f"{text} (default: {shown})")


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def whole_seconds(text: str) -> int:
    return round(seconds(text))
