"""The settings of a router, resolved and frozen. The properties of models come from the replicas, not from settings."""

from dataclasses import dataclass, field
from pathlib import Path

from octavo_server.config import HttpSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLimits:
    """Timeouts, retries and queue limits of forwarded requests. Each field is a flag."""

    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    max_retries: int = 2
    max_requests_per_replica: int | None = None
    max_queued_requests: int = 1024
    max_hold_s: float = 50.0
    breaker_failures: int = 3
    breaker_open_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(HttpSettings):
    """`admin_port`: a second port on the same host, for the routes of administrators and scrapers. `routing_headers`:
    whether responses to clients have `x-octavo-*` headers. `replica_key`: API key that the router sends to replicas.
    `admin_secrets`: they alone open the admin routes, beside the admin's API key; if there are none, the router secret
    does. `root_path`: a prefix that the paths of requests may have, without a slash at its end. `services_file`: see
    `ListedServices`.
    """

    admin_port: int | None = None
    admin_secrets: tuple[str, ...] = field(default=(), repr=False)
    routing_headers: bool = False
    root_path: str = ""
    services_file: Path | None = None
    replica_key: str = field(default="", repr=False)
    max_index_entries: int = 4_000_000
    forward: ForwardLimits = field(default_factory=ForwardLimits)
