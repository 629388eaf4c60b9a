"""How `octavo route` finds its replicas: a list, a DNS name or a Kubernetes Service; exactly one of them."""

import argparse

from octavo_engine.wire.errors import StartupError

from octavo_server.router.fleet.discovery.dns import DnsDiscovery
from octavo_server.router.fleet.discovery.kubernetes import ClusterAccess, KubernetesDiscovery
from octavo_server.router.fleet.endpoint import Discovery, StaticDiscovery

WAYS = ("--replica", "--service", "--kubernetes")


def discovery_of(args: argparse.Namespace) -> Discovery:
    """Raises StartupError."""
    given = [way for way in WAYS if getattr(args, way.removeprefix("--"))]
    if not given:
        raise StartupError("there is nothing to route to: give --replica URL ..., --service or --kubernetes.")
    if len(given) > 1:
        raise StartupError(f"{' and '.join(given)} name replicas in different ways: give one of them.")
    if args.replica:
        return StaticDiscovery(args.replica)
    if args.service:
        return DnsDiscovery(args.service, interval_s=args.service_interval)
    return KubernetesDiscovery(args.kubernetes, _access(args.kubernetes_api))


def _access(url: str | None) -> ClusterAccess:
    if url is None:
        return ClusterAccess.in_cluster()
    return ClusterAccess(url=url.rstrip("/"), namespace="default")
