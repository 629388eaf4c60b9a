"""How `octavo route` finds its replicas: a list, a DNS name or a Kubernetes Service; exactly one of them."""

import argparse
from typing import TYPE_CHECKING

from octavo_engine.wire.errors import StartupError

from octavo_server.cli.arg_types import positive_seconds

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
    group.add_argument("--service", metavar="HOST:PORT", help="DNS name whose addresses are the replicas.")
    group.add_argument(
        *("--service-interval",),
        type=positive_seconds,
        default=1.0,
        metavar="N",
        help="Seconds between DNS lookups. Default: 1.",
    )
    group.add_argument(
        "--kubernetes",
        metavar="[NAMESPACE/]SERVICE[:PORT]",
        help="Kubernetes Service whose pods, ready or not, are the replicas; PORT: name or number. Default: first.",
    )
    group.add_argument(
        "--kubernetes-api",
        metavar="URL",
        help="URL of the Kubernetes API, such as that of `kubectl proxy`. Default: the cluster that runs the router.",
    )


def discovery_of(args: argparse.Namespace) -> "Discovery":
    """Raises StartupError. The router is imported here, so that `octavo --help` need not load it."""
    from octavo_server.router.fleet.discovery.dns import DnsDiscovery
    from octavo_server.router.fleet.discovery.kubernetes import ClusterAccess, KubernetesDiscovery
    from octavo_server.router.fleet.endpoint import StaticDiscovery

    given = [way for way in WAYS if getattr(args, way.removeprefix("--"))]
    if not given:
        raise StartupError("no replicas to route to: give --replica URL ..., --service or --kubernetes.")
    if len(given) > 1:
        raise StartupError(f"{' and '.join(given)} both name replicas: give only one of them.")
    if args.replica:
        return StaticDiscovery(args.replica)
    if args.service:
        return DnsDiscovery(args.service, interval_s=args.service_interval)
    url = args.kubernetes_api
    if url is None:
        return KubernetesDiscovery(args.kubernetes, ClusterAccess.in_cluster())
    return KubernetesDiscovery(args.kubernetes, ClusterAccess(url=url.rstrip("/"), namespace="default"))
