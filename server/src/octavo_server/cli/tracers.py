"""The tracers that --otlp-traces-endpoint requests."""

from typing import TYPE_CHECKING

from octavo_engine.wire.errors import StartupError

from octavo_server.config import HttpSettings, ServerConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from octavo_server.router.observe.spans import RouteTracer
    from octavo_server.tracing import RequestTracer


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
