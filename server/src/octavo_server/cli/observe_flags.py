"""Flags for logs, metrics, traces and health; makes the tracer that these flags request."""

import argparse
import re
from typing import TYPE_CHECKING, Any

from octavo_engine.settings.arg_types import add_seconds
from octavo_engine.wire.errors import StartupError

from octavo_server.cli.http_flags import add_log_flags, add_traces_flag
from octavo_server.config import HttpSettings, ServerConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from octavo_server.router.observe.spans import RouteTracer
    from octavo_server.tracing import RequestTracer


def add_observability_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("observability")
    text = "Seconds without progress on unfinished requests after which /health returns 503; 0: never."
    add_seconds(group, "--health-stall-timeout", text, default=60.0)
    add_log_flags(group)
    group.add_argument(
        "--disable-access-log-for-endpoints",
        type=comma_list,
        default=(),
        metavar="TEXT",
        help="Paths without log line, such as /v1/models,/tokenize. Default: none.",
    )
    group.add_argument(
        "--metrics-prefix",
        type=metrics_prefix,
        default="vllm:",
        metavar="TEXT",
        help="Prefix of the names of the metrics that vLLM also has. Default: 'vllm:'.",
    )
    group.add_argument(
        "--enable-per-request-metrics",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Field `metrics` of responses, with the times of the request. Default: off.",
    )
    add_traces_flag(group)


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def metrics_prefix(text: str) -> str:
    if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} can't begin a metric's name: use letters, digits, '_' and ':'")
    return text


def tracer_of(config: ServerConfig) -> "RequestTracer | None":
    """Tracer of `octavo serve`. Raises StartupError for a bad endpoint, and if OpenTelemetry isn't installed."""
    if config.otlp_traces_endpoint is None:
        return None
    provider = _trace_provider(config.otlp_traces_endpoint)
    from octavo_server.tracing import RequestTracer

    return RequestTracer(provider, config.model_name)


def route_tracer_of(settings: HttpSettings) -> "RouteTracer | None":
    """Tracer of `octavo route`. Raises StartupError for a bad endpoint, and if OpenTelemetry isn't installed."""
    if settings.otlp_traces_endpoint is None:
        return None
    provider = _trace_provider(settings.otlp_traces_endpoint)
    from octavo_server.router.observe.spans import RouteTracer

    return RouteTracer(provider)


def _trace_provider(endpoint: str) -> "TracerProvider":
    try:
        from octavo_server.tracing import otlp_provider
    except ModuleNotFoundError as error:
        raise StartupError(f"--otlp-traces-endpoint needs {error.name}: pip install 'octavo-server[otel]'") from error
    return otlp_provider(endpoint)


def observability_of(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `ServerConfig` for unlogged paths, health and metrics; logs and traces are in `http_settings_of`."""
    return {
        "unlogged_paths": args.disable_access_log_for_endpoints,
        "health_stall_timeout_s": args.health_stall_timeout,
        "metrics_prefix": args.metrics_prefix,
        "enable_per_request_metrics": args.enable_per_request_metrics,
    }
