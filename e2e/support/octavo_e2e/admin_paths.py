"""Paths that no client may reach: paths of a router's admin port, and internal paths of engines."""

ROUTER = ("/metrics", "/debug/decisions", "/debug/decisions/ended", "/debug/index", "/drain", "/state/events")
KV = ("/kv/events", "/kv/snapshot", "/kv/model")
SLEEP = ("/sleep", "/wake_up", "/is_sleeping")
ENGINE = (*KV, "/debug/requests", "/drain", "/reset_prefix_cache", "/server_info", *SLEEP)
NOT_FOR_CLIENTS = tuple(dict.fromkeys((*ROUTER, *ENGINE)))
#: Other spellings of a router's metrics path, which a proxy may forward unchanged or normalise.
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
