"""Plans the processes of `octavo up` and their arguments. Pure: it gets ports, resources and the secret as inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo_server.cli.banner import reachable_host
from octavo_server.config import SECRET_VARIABLE
from octavo_server.http.listener import LOOPBACK
from octavo_server.up.child import ChildSpec
from octavo_server.up.resource_split import ResourceShare

ROUTER = "router"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """One engine. `args`: arguments of `octavo serve`. `env`: environment variables that a manifest sets. `position`:
    index among all engines."""

    name: str
    args: tuple[str, ...]
    port: int
    position: int
    share: ResourceShare
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Input of the plan. `route_args`: arguments of `octavo route`. `secret`: the router's secret, empty if no API key
    is required; the engines then answer any client on this machine, and requests have no tenant."""

    engines: tuple[EngineOptions, ...]
    route_args: tuple[str, ...]
    host: str | None = None
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    router: ChildSpec
    replicas: tuple[ChildSpec, ...]

    @property
    def names(self) -> list[str]:
        return [self.router.name, *(replica.name for replica in self.replicas)]


def plan_children(options: UpOptions) -> Plan:
    """Plan the processes to start. Arguments that the user typed come last, so that they take precedence."""
    replicas = tuple(_replica(engine, options) for engine in options.engines)
    host = () if options.host is None else ("--host", options.host)
    args = ("route", *host, "--port", str(options.port), *_each("--replica", [replica.url for replica in replicas]))
    router = ChildSpec(
        name=ROUTER,
        args=(*args, *options.route_args),
        url=f"http://{reachable_host(options.host)}:{options.port}",
        env=_secret_env(options),
    )
    return Plan(router, replicas)


def _replica(engine: EngineOptions, options: UpOptions) -> ChildSpec:
    share = engine.share
    threads = () if share.num_threads is None else ("--num-threads", str(share.num_threads))
    own = ("--host", LOOPBACK, "--port", str(engine.port), "--disable-uvicorn-access-log", *threads)
    return ChildSpec(
        name=engine.name,
        args=("serve", *own, *engine.args),
        url=f"http://{LOOPBACK}:{engine.port}",
        env={**share.env(engine.position), **engine.env, **_secret_env(options)},
    )


def _secret_env(options: UpOptions) -> dict[str, str]:
    return {SECRET_VARIABLE: options.secret} if options.secret else {}


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]
