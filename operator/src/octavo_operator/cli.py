"""The flags of `octavo-operator`."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from octavo_operator.service import Settings

DEFAULT_WORKERS = 16


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo-operator",
        description="Create the engines and routers of InferenceServices, and keep them running.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--namespace",
        action="append",
        dest="namespaces",
        help="namespace whose InferenceServices the operator manages; may be repeated (default: all)",
    )
    _add_pod_flags(parser)
    _add_monitoring_flags(parser)
    _add_lease_flags(parser)
    _add_metrics_api_flags(parser)
    parser.add_argument(
        "--workers",
        type=int,
        default=DEFAULT_WORKERS,
        metavar="N",
        help="number of services that are reconciled concurrently (default: %(default)s)",
    )
    parser.add_argument(
        "--liveness",
        metavar="URL",
        default="http://0.0.0.0:8080/healthz",
        help="URL of the liveness probe, with the address on which /readyz and /metrics are served, too "
        "(default: %(default)s)",
    )
    formats = ("json", "text")
    parser.add_argument(
        "--log-format", choices=formats, default="json", help="format of log lines (default: %(default)s)"
    )
    return parser


def _add_pod_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine-image", required=True, help="image of engine pods, unless the spec of their service names one")
    add("--router-image", required=True, help="image of router pods, unless the spec of their service names one")
    policies = ("Always", "IfNotPresent", "Never")
    add("--image-pull-policy", choices=policies, help="pull policy of --engine-image and --router-image")
    add(
        "--image-pull-secret",
        action="append",
        dest="image_pull_secrets",
        default=[],
        metavar="NAME",
        help="name of a pull Secret, in the namespace of each service, which pods use beside those of the spec; may be "
        "repeated",
    )
    add(
        "--router-role",
        default="ClusterRole/octavo-router",
        metavar="KIND/NAME",
        type=_role,
        help="ClusterRole, or Role in each namespace, by which routers read EndpointSlices (default: %(default)s)",
    )
    add("--cluster-domain", default="cluster.local", help="DNS domain of the cluster (default: %(default)s)")
    add(
        "--lame-duck",
        type=int,
        default=15,
        metavar="S",
        help="seconds for which terminating pods keep serving while proxies remove them (default: %(default)s)",
    )
    add(
        "--max-rollouts",
        type=int,
        default=1,
        metavar="N",
        help="number of services that another default image or setting of pods rolls out at a time (default: "
        "%(default)s)",
    )
    add(
        "--no-fixed-user",
        action="store_true",
        help="let the platform assign the user of engine and router pods, as OpenShift does; without it, user 10001",
    )
    add(
        "--pod-templates",
        choices=("restricted", "any"),
        default="restricted",
        help="whether specs may give pods rights on their node, such as hostPath volumes and privileged containers "
        "(default: %(default)s)",
    )
    add("--gateway-api", action="store_true", help="create HTTPRoutes (Gateway API) for services with exposure.gateway")


def _add_monitoring_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pod-monitors", action="store_true", help="create PodMonitors of engines and routers")
    add(
        "--monitor-label",
        action="append",
        dest="monitor_labels",
        default=[],
        metavar="NAME=VALUE",
        type=_label,
        help="label to set on PodMonitors, by which Prometheus selects them; may be repeated",
    )
    add(
        "--scraped-from",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="namespace whose Prometheus may read metrics of engines and routers, by NetworkPolicies; may be repeated",
    )
    add(
        "--scrape-peer",
        action="append",
        dest="scrape_peers",
        default=[],
        metavar="JSON",
        type=_json_object,
        help="peer of a NetworkPolicy that may read metrics of engines and routers, as a JSON object with podSelector, "
        "namespaceSelector or ipBlock; may be repeated",
    )


def _add_lease_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    namespace = os.environ.get("POD_NAMESPACE", "default")
    add("--lease-namespace", default=namespace, help="namespace of operator and Lease (default: %(default)s)")
    add("--lease-name", default="octavo-operator", help="name of the Lease for leader election (default: %(default)s)")
    add(
        "--identity",
        default=os.environ.get("POD_NAME") or os.uname().nodename,
        help="name of this operator as holder of the Lease (default: name of the pod)",
    )
    key = parser.add_mutually_exclusive_group(required=True)
    key.add_argument(
        "--key-secret",
        metavar="NAME",
        help="Secret in --lease-namespace with the key from which routers' secrets are derived; created if missing",
    )
    key.add_argument("--key-file", type=Path, help="file with the key from which routers' secrets are derived")


def _add_metrics_api_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--metrics-api-port",
        type=int,
        default=0,
        metavar="PORT",
        help="port on which the API server gets the custom metrics of services, for their HorizontalPodAutoscalers "
        "(default: 0, not served: the operator scales them itself)",
    )
    add(
        "--metrics-api-service",
        default="octavo-metrics-api",
        metavar="NAME",
        help="Service in --lease-namespace of that port, and Secret with its certificate authority, which is created "
        "(default: %(default)s)",
    )


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(
        engine_image=args.engine_image,
        router_image=args.router_image,
        operator_namespace=args.lease_namespace,
        image_pull_policy=args.image_pull_policy,
        image_pull_secrets=tuple(args.image_pull_secrets),
        router_role=args.router_role,
        cluster_domain=args.cluster_domain,
        lame_duck_s=args.lame_duck,
        max_rollouts=args.max_rollouts,
        has_pod_monitors=args.pod_monitors,
        has_metrics_api=args.metrics_api_port > 0,
        monitor_labels=dict(args.monitor_labels),
        scraped_from=tuple(args.scraped_from),
        scrape_peers=tuple(args.scrape_peers),
        has_fixed_user=not args.no_fixed_user,
        restricts_pods=args.pod_templates == "restricted",
        has_gateway_api=args.gateway_api,
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def _role(text: str) -> str:
    kind, _, name = text.partition("/")
    if kind not in ("ClusterRole", "Role") or not name:
        raise argparse.ArgumentTypeError(f"{text} is not ClusterRole/NAME or Role/NAME")
    return text


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value
