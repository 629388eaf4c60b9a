"""The settings of a router, resolved and frozen. The properties of models come from the replicas, not from settings."""

from dataclasses import dataclass, field
from pathlib import Path

from octavo_engine.settings.arg_types import MAX_PORT, positive_seconds, seconds
from octavo_engine.settings.declare import Declared, setting

from octavo_server.config import ADMIN_SECRET_VARIABLE, HttpSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLimits(Declared):
    """Timeouts, retries and queue limits of forwarded requests."""

    connect_timeout: float = setting(
        2.0, "Seconds that connecting to a replica may take.", group="forwarding of requests", parse=positive_seconds
    )
    first_byte_timeout: float = setting(
        600.0,
        "Seconds in which a replica must begin its response; otherwise the client gets status 504.",
        parse=positive_seconds,
    )
    idle_timeout: float = setting(
        120.0, "Seconds without data from the replica after which a started response is ended.", parse=positive_seconds
    )
    max_retries: int = setting(
        2, "Largest number of retries of a request whose replica failed before it began its response."
    )
    max_requests_per_replica: int | None = setting(
        None, "Largest number of requests in flight at a replica; further requests wait in the router's queue.", ge=1
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
        3, "Consecutive failures of a replica after which it gets no requests for --breaker-open-time seconds.", ge=1
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
    """Settings of the router. `admin_secret`: if set, only it and the key named `admin` open the admin routes."""

    admin_port: int | None = setting(
        None,
        "Second port on the same host; /metrics and admin routes then answer only there; 0: any free port.",
        group="server",
        unset="none, so that all routes answer on --port",
        ge=0,
        le=MAX_PORT,
        metavar="PORT",
    )
    root_path: str = setting(
        "",
        "Prefix that the paths of requests may have, such as /models if clients use http://HOST/models/v1; it is "
        "removed.",
        convert=lambda path: path.rstrip("/"),
        metavar="PATH",
    )
    workers: int = setting(
        1, "Number of processes that share the port, each with its own index of KV blocks and its own limits.", ge=1
    )
    replica_key: str | None = setting(
        None, "API key that the router sends to replicas.", group="replicas", metavar="KEY", secret=True
    )
    services_file: Path | None = setting(
        None,
        "JSON file with all services behind the router and their models, read again when it changes: requests for a "
        "model without a replica wait, and other names get status 404 at once.",
        unset="the models of the replicas",
    )
    max_index_entries: int = setting(
        4_000_000,
        "Largest number of KV blocks in the router's index, which takes about 110 bytes of memory for each.",
        ge=1,
    )
    admin_secret: tuple[str, ...] = setting(
        (),
        "Secret that opens the admin routes of the router instead of --router-secret, which every replica has; several "
        "secrets during a rotation.",
        group="API keys",
        env=(ADMIN_SECRET_VARIABLE,),
        unset="the router secret opens them",
        metavar="SECRET",
        secret=True,
    )
    routing_headers: bool = setting(
        False,
        "Send clients the response headers x-octavo-rung (basis of the routing decision), x-octavo-replica and "
        "x-octavo-cached-tokens, which reveal replicas and cache contents.",
        group="forwarding of requests",
    )
    forward: ForwardLimits = field(default_factory=ForwardLimits)
