"""Which processes `octavo up` starts, with which arguments. Pure: ports, shares and the secret are given."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo_server.cli.banner import reachable
from octavo_server.cli.secret_flags import SECRET_VARIABLE
from octavo_server.up.child import ChildSpec
from octavo_server.up.ports import LOOPBACK
from octavo_server.up.shares import Share

ROUTER = "router"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """`serve_args` and `route_args`: as they were typed. `secret`: empty where no API key is asked for, as then the
    engines answer everybody on this machine, and nobody is anybody's tenant."""

    serve_args: tuple[str, ...]
    route_args: tuple[str, ...]
    host: str | None = None
    port: int
    replica_ports: tuple[int, ...]
    secret: str = field(repr=False)
    share: Share


@dataclass(frozen=True, slots=True)
class Plan:
    router: ChildSpec
    replicas: tuple[ChildSpec, ...]

    @property
    def names(self) -> list[str]:
        return [self.router.name, *(replica.name for replica in self.replicas)]


def plan_children(options: UpOptions) -> Plan:
    """What was typed comes last, so that it wins."""
    replicas = tuple(_replica(options, position) for position in range(len(options.replica_ports)))
    host = () if options.host is None else ("--host", options.host)
    args = ("route", *host, "--port", str(options.port), *_each("--replica", [replica.url for replica in replicas]))
    router = ChildSpec(
        name=ROUTER,
        args=(*args, *options.route_args),
        url=f"http://{reachable(options.host)}:{options.port}",
        env=_secret_env(options),
    )
    return Plan(router, replicas)


def _replica(options: UpOptions, position: int) -> ChildSpec:
    port, share = options.replica_ports[position], options.share
    threads = () if share.num_threads is None else ("--num-threads", str(share.num_threads))
    own = ("--host", LOOPBACK, "--port", str(port), "--disable-uvicorn-access-log", *threads)
    return ChildSpec(
        name=f"replica-{position}",
        args=("serve", *own, *options.serve_args),
        url=f"http://{LOOPBACK}:{port}",
        env={**_secret_env(options), **share.env(position)},
    )


def _secret_env(options: UpOptions) -> dict[str, str]:
    return {SECRET_VARIABLE: options.secret} if options.secret else {}


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [part for value in values for part in (flag, value)]
