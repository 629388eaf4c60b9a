"""The server's load in the header `endpoint-load-metrics` of unstreamed responses, for load balancers (ORCA).

A request asks for it by the header `endpoint-load-metrics-format`, whose value is TEXT or JSON, as in vLLM.
"""

import json
from collections.abc import Callable

from octavo_engine.frontend.async_llm import AsyncLLM
from starlette.requests import Request

RawHeaders = list[tuple[bytes, bytes]]


def with_load(request: Request, client: AsyncLLM, headers: Callable[[], RawHeaders]) -> Callable[[], RawHeaders]:
    """Return `headers`, extended by the load when the response starts if the request asks for it."""
    form = request.headers.get("endpoint-load-metrics-format", "").upper()
    if form not in ("TEXT", "JSON"):
        return headers

    def extended() -> RawHeaders:
        stats = client.stats
        named = {"kv_cache_usage_perc": stats.kv_usage, "num_requests_waiting": float(stats.waiting)}
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        value = text if form == "TEXT" else json.dumps({"named_metrics": named})
        return [*headers(), (b"endpoint-load-metrics", f"{form} {value}".encode())]

    return extended
