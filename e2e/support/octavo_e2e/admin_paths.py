"""Paths that no client may reach: those of a router's admin port, and those of engines, which routers never forward."""

ROUTER = ("/metrics", "/debug/decisions", "/debug/decisions/ended", "/debug/index", "/drain", "/state/events")
KV = ("/kv/events", "/kv/snapshot", "/kv/model")
ENGINE = (*KV, "/debug/requests", "/drain", "/reset_prefix_cache", "/server_info")
NOT_FOR_CLIENTS = tuple(dict.fromkeys((*ROUTER, *ENGINE)))
#: Other spellings of a router's metrics, which a proxy may forward as they are or normalise.
SPELLINGS = (
    "//metrics",
    "/./metrics",
    "/%6detrics",
    "/metrics/",
    "/v1/../metrics",
    "/v1/%2e%2e/metrics",
)
METHODS = ("GET", "HEAD", "POST", "DELETE")
PROBES = ("/health", "/ready", "/ping", "/version")
