"""Flags by which `octavo route` finds its replicas: a list of URLs, a DNS name or a Kubernetes Service."""

import argparse
from typing import TYPE_CHECKING

from octavo_engine.settings.arg_types import positive_seconds
from octavo_engine.wire.errors import StartupError

if TYPE_CHECKING:
    from octavo_server.router.fleet.endpoint import Discovery

WAYS = ("--replica", "--service", "--kubernetes")


def add_discovery_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("discovery of replicas")
    group.add_argument(
        *("--replica",),
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="URLs of the replicas, http://HOST:PORT; may be repeated.",
    )
    group.add_argument(
        "--service", metavar="HOST:PORT", help="DNS name of which each address is a replica, and the replicas' port."
    )
    group.add_argument(
        *("--service-interval",),
        type=positive_seconds,
        default=1.0,
        metavar="N",
        help="Seconds between DNS lookups for --service. Default: 1.",
    )
    group.add_argument(
        "--kubernetes",
        metavar="[NAMESPACE/]SERVICE[:PORT]",
        help="Kubernetes Service whose pods, ready or not, are the replicas; PORT: name or number of a port. Default: "
        "the router's namespace and the Service's first port.",
    )
    group.add_argument(
        "--kubernetes-api",
        metavar="URL",
        help="URL of the Kubernetes API server, such as that of `kubectl proxy`. Default: the API server of the "
        "router's own cluster.",
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
