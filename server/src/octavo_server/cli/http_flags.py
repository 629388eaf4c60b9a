"""Flags that `octavo serve` and `octavo route` share, and the `HttpSettings` that they set."""

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
    """Fields of `HttpSettings` except the limits."""
    return {
        "host": args.host,
        "port": args.port,
        "uvicorn_log_level": args.uvicorn_log_level,
        **keys_of(args),
        "allowed_origins": tuple(args.allowed_origins or ()),
        "log_format": args.log_format,
        "logs_access": not args.disable_uvicorn_access_log,
        "drain_timeout_s": args.drain_timeout,
        "shutdown_delay_s": args.shutdown_delay,
        "keep_alive_s": args.keep_alive_timeout,
        "slow_client_timeout_s": args.slow_client_timeout,
        "otlp_traces_endpoint": args.otlp_traces_endpoint,
    }


def add_address_flags(group: Any) -> None:
    group.add_argument("--host", help="Address to listen on. Default: all addresses.")
    group.add_argument("--port", type=port, default=8000, help="Port to listen on; 0: any free port. Default: 8000.")
    group.add_argument(
        "--uvicorn-log-level",
        choices=UVICORN_LOG_LEVELS,
        default="info",
        help="Least level of uvicorn's log lines. Default: info.",
    )


def add_origins_flag(group: Any) -> None:
    group.add_argument(
        *("--allowed-origins",),
        type=json_list,
        metavar="JSON",
        help='Origins of web pages that may read responses (CORS), as a JSON list; ["*"]: all. Default: none.',
    )


def json_list(text: str) -> list[str]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(item, str) for item in parsed):
        raise ArgumentTypeError(f'{text!r} is not a JSON list of strings, such as ["https://example.org"]')
    return parsed


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise ArgumentTypeError(f"{text!r} is not a port: give 0 to {MAX_PORT}")
    return int(text)


def add_log_flags(group: Any) -> None:
    group.add_argument(
        "--log-format", choices=get_args(LogFormat), default="text", help="Format of log lines. Default: text."
    )
    group.add_argument(
        "--disable-uvicorn-access-log",
        action=BooleanOptionalAction,
        default=False,
        help="No log line per HTTP request; probes and scrapes are never logged. Default: off.",
    )


def add_traces_flag(group: Any) -> None:
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="URL of an OpenTelemetry collector for traces (OTLP over HTTP), such as http://collector:4318/v1/traces. "
        "Default: none.",
    )


def add_key_flags(parser: Any) -> Any:
    """Add the flags; return their group."""
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
        help=f"Most bytes of all request bodies in memory at once; beyond it 503. Default: {default}.",
    )


def add_request_timeout(group: Any) -> None:
    text = "Seconds that a client has to send the headers of a request, and again for its body."
    add_seconds(group, "--request-timeout", text, default=RequestLimits().request_timeout_s)


def add_connection_flags(parser: Any) -> None:
    group = parser.add_argument_group("connections")
    group.add_argument(
        "--keep-alive-timeout",
        type=whole_seconds,
        default=120,
        metavar="S",
        help="Seconds that an idle connection stays open; should exceed the idle timeout of proxies. Default: 120.",
    )
    text = "Seconds after which a client that does not read its response is disconnected."
    add_seconds(group, "--slow-client-timeout", text, default=60.0)


def add_lifecycle_flags(parser: Any) -> None:
    group = parser.add_argument_group("shutdown")
    text = "Seconds that running requests have to finish after SIGTERM or POST /drain."
    add_seconds(group, "--drain-timeout", text, default=30.0)
    text = (
        "Least seconds between SIGTERM and exit, in which new requests get 503 so that proxies notice; Ctrl-C skips "
        "this delay."
    )
    add_seconds(group, "--shutdown-delay", text, default=0.0)
