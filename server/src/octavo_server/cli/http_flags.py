"""The flags that `octavo serve` and `octavo route` have alike, and the `HttpSettings` that they make."""

import json
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from typing import Any, get_args

from octavo_engine.log_format import LogFormat

from octavo_server.cli.arg_types import add_seconds, size, whole_seconds
from octavo_server.cli.secret_flags import add_api_key_flags, add_secret_flags, keys_of
from octavo_server.config import HttpSettings, RequestLimits

MAX_PORT = 65535
UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def http_settings_of(args: Namespace) -> dict[str, Any]:
    """The fields of `HttpSettings`, but for the limits."""
    return {
        "host": args.host,
        "port": args.port,
        "uvicorn_log_level": args.uvicorn_log_level,
        **keys_of(args),
        "allowed_origins": None if args.allowed_origins is None else tuple(args.allowed_origins),
        "log_format": args.log_format,
        "logs_access": not args.disable_uvicorn_access_log,
        "drain_timeout_s": args.drain_timeout,
        "shutdown_delay_s": args.shutdown_delay,
        "keep_alive_s": args.keep_alive_timeout,
        "slow_client_timeout_s": args.slow_client_timeout,
        "otlp_traces_endpoint": args.otlp_traces_endpoint,
    }


def add_address_flags(group: Any) -> None:
    group.add_argument("--host", help="address to listen on (default: all)")
    group.add_argument("--port", type=port, default=8000, help="port to listen on; 0: a free one (default: 8000)")
    group.add_argument("--uvicorn-log-level", choices=UVICORN_LOG_LEVELS, default="info", help="(default: info)")


def add_origins_flag(group: Any) -> None:
    group.add_argument(
        *("--allowed-origins",),
        type=json_list,
        metavar="JSON",
        help='origins of web pages that may read answers (CORS), as a JSON list; ["*"]: all (default: all where an '
        "API key is needed, else none)",
    )


def json_list(text: str) -> list[str]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(item, str) for item in parsed):
        raise ArgumentTypeError(f'{text!r} is no JSON list of strings, such as ["https://example.org"]')
    return parsed


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise ArgumentTypeError(f"{text!r} is no port: from 0 to {MAX_PORT}")
    return int(text)


def add_log_flags(group: Any) -> None:
    group.add_argument("--log-format", choices=get_args(LogFormat), default="text", help="(default: text)")
    group.add_argument(
        "--disable-uvicorn-access-log",
        action=BooleanOptionalAction,
        default=False,
        help="no line for each HTTP request; probes and scrapes never get one (default: off)",
    )


def add_traces_flag(group: Any) -> None:
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="collector of OpenTelemetry traces, OTLP over HTTP: http://collector:4318/v1/traces (default: none)",
    )


def add_key_flags(parser: Any) -> Any:
    """The group of flags."""
    group = parser.add_argument_group("API keys")
    add_api_key_flags(group)
    add_secret_flags(group)
    return group


def add_body_memory_flag(group: Any) -> None:
    default = HttpSettings().max_body_memory_bytes
    group.add_argument(
        "--max-body-memory",
        type=size,
        default=default,
        metavar="N",
        help=f"bytes of all request bodies that are read or held at once; beyond it 503 (default: {default})",
    )


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


def add_lifecycle_flags(parser: Any) -> None:
    group = parser.add_argument_group("shutdown")
    text = "seconds that running requests have to finish after SIGTERM or POST /drain"
    add_seconds(group, "--drain-timeout", text, default=30.0)
    text = (
        "seconds to go on answering 503 after SIGTERM though nothing runs, until proxies have noticed; Ctrl-C doesn't "
        "wait"
    )
    add_seconds(group, "--shutdown-delay", text, default=0.0)
