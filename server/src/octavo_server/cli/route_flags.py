"""Flags of `octavo route`. A flag that `octavo serve` has too has the same meaning in both commands.

The router finds its replicas by a list of URLs, a DNS name or a Kubernetes Service.
"""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.settings.arg_types import positive_seconds
from octavo_engine.settings.declare import Declared, setting
from octavo_engine.wire.errors import StartupError

from octavo_server.cli.config_file import add_config_flag
from octavo_server.cli.declared_flags import add_flags, record_of
from octavo_server.router.settings import RouterSettings

if TYPE_CHECKING:
    from octavo_server.router.fleet.endpoint import Discovery


WAYS = ("--replica", "--service", "--kubernetes")


def add_route_flags(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_flags(parser, RouterSettings, DiscoveryFlags)


def settings_of(args: argparse.Namespace) -> RouterSettings:
    """`RouterSettings` from the flags. Raises StartupError for an invalid combination or an empty key."""
    settings = record_of(RouterSettings, args)
    if settings.admin_port and settings.admin_port == settings.port:
        raise StartupError(f"--admin-port and --port are both {settings.port}: give two different ports.")
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryFlags(Declared):
    replica: tuple[str, ...] = setting(
        (), "URLs of the replicas, http://HOST:PORT.", group="discovery of replicas", repeats=True, metavar="URL"
    )
    service: str | None = setting(
        None, "DNS name of which each address is a replica, and the replicas' port.", metavar="HOST:PORT"
    )
    service_interval: float = setting(1.0, "Seconds between DNS lookups for --service.", parse=positive_seconds)
    kubernetes: str | None = setting(
        None,
        "Kubernetes Service whose pods, ready or not, are the replicas, in the router's namespace unless another one "
        "is given; PORT: name or number of a port, otherwise the Service's first one.",
        metavar="[NAMESPACE/]SERVICE[:PORT]",
    )
    kubernetes_api: str | None = setting(
        None,
        "URL of the Kubernetes API server, such as that of `kubectl proxy`.",
        metavar="URL",
        unset="the API server of the router's own cluster",
    )


def discovery_of(args: argparse.Namespace) -> "Discovery":
    """Discovery that the flags choose. Raises StartupError unless they choose exactly one. The router is imported here,
    so that `octavo --help` need not load it."""
    from octavo_server.router.fleet.discovery.dns import DnsDiscovery
    from octavo_server.router.fleet.discovery.kubernetes import ClusterAccess, KubernetesDiscovery
    from octavo_server.router.fleet.endpoint import StaticDiscovery

    ways = [way for way in WAYS if getattr(args, way.removeprefix("--"))]
    if not ways:
        raise StartupError("the router has no replicas: give --replica URL ..., --service or --kubernetes.")
    if len(ways) > 1:
        raise StartupError(f"{' and '.join(ways)} both name replicas: give only one of these flags.")
    if args.replica:
        return StaticDiscovery(args.replica)
    if args.service:
        return DnsDiscovery(args.service, interval_s=args.service_interval)
    url = args.kubernetes_api
    if url is None:
        return KubernetesDiscovery(args.kubernetes, ClusterAccess.in_cluster())
    return KubernetesDiscovery(args.kubernetes, ClusterAccess(url=url.rstrip("/"), namespace="default"))
