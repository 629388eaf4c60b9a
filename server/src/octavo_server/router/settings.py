"""The settings of a router, resolved and frozen. The properties of models come from the replicas, not from settings."""

from dataclasses import dataclass, field
from pathlib import Path

from octavo_engine.settings.arg_types import positive_seconds, seconds
from octavo_engine.settings.declare import setting

from octavo_server.config import HttpSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLimits:
    """Timeouts, retries and queue limits of forwarded requests."""

    connect_timeout: float = setting(
        2.0,
        "Seconds that connecting to a replica may take.",
        group="forwarding of requests",
        parse=positive_seconds,
    )
    first_byte_timeout: float = setting(
        600.0,
        "Seconds in which a replica must begin its response; otherwise the client gets status 504.",
        parse=positive_seconds,
    )
    idle_timeout: float = setting(
        120.0,
        "Seconds without data from the replica after which a started response is ended.",
        parse=positive_seconds,
    )
    max_retries: int = setting(
        2, "Largest number of retries of a request whose replica failed before it began its response."
    )
    max_requests_per_replica: int | None = setting(
        None,
        "Largest number of requests in flight at a replica; further requests wait in the router's queue.",
        ge=1,
    )
    max_queued_reqs: int = setting(
        1024, "Largest number of requests in the router's queue; further requests get status 429."
    )
    max_hold_time: float = setting(
        50.0,
        "Seconds after which a request that still waits in the router for a replica gets status 503.",
        parse=seconds,
        metavar="N",
    )
    breaker_failures: int = setting(
        3,
        "Consecutive failures of a replica after which it gets no requests for --breaker-open-time seconds.",
        ge=1,
    )
    breaker_open_time: float = setting(
        1.0,
        "Seconds for which a replica gets no requests after --breaker-failures failures; doubled by each further "
        "failure, up to 30.",
        parse=seconds,
        metavar="N",
    )


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
