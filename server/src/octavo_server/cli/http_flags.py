"""Flags that `octavo serve` and `octavo route` share, and the `HttpSettings` that they set."""

from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from typing import Any, get_args

from octavo_engine.log_format import LogFormat
from octavo_engine.settings.arg_types import add_seconds, json_list, positive_count, size, whole_seconds

from octavo_server.cli.secret_flags import add_api_key_flags, add_secret_flags, keys_of
from octavo_server.cli.vllm_environment import KEEP_ALIVE_VARIABLE, seconds_of_environment
from octavo_server.config import HttpSettings

MAX_PORT = 65535
UVICORN_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def http_settings_of(args: Namespace) -> dict[str, Any]:
    """Arguments of `HttpSettings`, except those that set limits."""
    return {
        "host": args.host,
        "port": args.port,
        "uvicorn_log_level": args.uvicorn_log_level,
        **keys_of(args),
        "allowed_hosts": tuple(args.allowed_hosts),
        "allowed_origins": tuple(args.allowed_origins or ()),
        "allowed_methods": tuple(args.allowed_methods),
        "allowed_headers": tuple(args.allowed_headers),
        "allow_credentials": args.allow_credentials,
        "log_format": args.log_format,
        "logs_access": not args.disable_uvicorn_access_log,
        "drain_timeout_s": args.drain_timeout,
        "shutdown_delay_s": args.shutdown_delay,
        "keep_alive_s": _keep_alive_s(args.keep_alive_timeout),
        "slow_client_timeout_s": args.slow_client_timeout,
        "max_connections": args.max_connections,
        "otlp_traces_endpoint": args.otlp_traces_endpoint,
    }


def _keep_alive_s(given: int | None) -> int:
    """Raises StartupError for a variable that is no number."""
    if given is not None:
        return given
    value = seconds_of_environment(KEEP_ALIVE_VARIABLE)
    return HttpSettings().keep_alive_s if value is None else round(value)


def add_address_flags(group: Any) -> None:
    group.add_argument("--host", help="Address to listen on. Default: all addresses of this machine.")
    group.add_argument("--port", type=port, default=8000, help="Port to listen on; 0: any free port. Default: 8000.")
    group.add_argument(
        "--uvicorn-log-level",
        choices=UVICORN_LOG_LEVELS,
        default="info",
        help="Lowest level of uvicorn's messages that are logged. Default: info.",
    )


def add_cors_flags(group: Any) -> None:
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Names under which clients may call a server without API keys, besides IP addresses, localhost and the "
        "name of this machine; *: all names. Default: none.",
    )
    group.add_argument(
        *("--allowed-origins",),
        type=json_list,
        metavar="JSON",
        help='Origins of web pages that may read responses (CORS), as a JSON list; ["*"]: all origins. Default: none.',
    )
    for flag, what in (("--allowed-methods", "Methods"), ("--allowed-headers", "Headers")):
        text = f"{what} of requests from those pages, as a JSON list. Default: all."
        group.add_argument(flag, type=json_list, metavar="JSON", default=["*"], help=text)
    group.add_argument(
        "--allow-credentials",
        action=BooleanOptionalAction,
        default=False,
        help="Permission for those pages to send cookies. Default: off.",
    )


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
        help="Omit the log line per HTTP request; probes and scrapes are never logged. Default: off.",
    )


def add_traces_flag(group: Any) -> None:
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="URL of an OpenTelemetry collector that gets traces of requests (OTLP over HTTP), such as "
        "http://collector:4318/v1/traces. Default: none.",
    )


def add_key_flags(parser: Any) -> Any:
    """Add the flags of API keys and router secrets; return their argument group."""
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
        help="Largest number of bytes of all request bodies in memory, and of answers that are not streamed; a request "
        f"beyond it gets status 503. Default: {default}.",
    )


def add_connection_flags(parser: Any) -> None:
    group = parser.add_argument_group("connections")
    group.add_argument(
        "--keep-alive-timeout",
        type=whole_seconds,
        metavar="S",
        help="Seconds that a connection stays open without a request; should exceed the idle timeout of proxies in "
        f"front. Default: ${KEEP_ALIVE_VARIABLE}, else 120.",
    )
    text = "Seconds after which a client that has stopped reading its response is disconnected."
    add_seconds(group, "--slow-client-timeout", text, default=60.0)
    default = HttpSettings().max_connections
    group.add_argument(
        "--max-connections",
        type=positive_count,
        default=default,
        metavar="N",
        help="Number of connections of a process beyond which a new one closes the one that has been without a request "
        f"for longest. Connections with a request in progress stay open. Default: {default}.",
    )


def add_lifecycle_flags(parser: Any) -> None:
    group = parser.add_argument_group("shutdown")
    text = "Seconds that running requests have to finish after SIGTERM or POST /drain."
    add_seconds(group, "--drain-timeout", text, default=30.0, alias="--shutdown-timeout")
    text = (
        "Smallest number of seconds between SIGTERM and exit, so that proxies notice the end. Meanwhile a router "
        "serves new requests, and `octavo serve` answers them with status 503. Ctrl-C skips this delay."
    )
    add_seconds(group, "--shutdown-delay", text, default=0.0)
