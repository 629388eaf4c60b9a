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
    text = "Namespaces whose InferenceServices the operator manages; one for each flag. Default: all."
    _add_list(parser, "--namespace", text, dest="namespaces", metavar="NAMESPACE")
    _add_pod_flags(parser)
    _add_monitoring_flags(parser)
    _add_lease_flags(parser)
    _add_metrics_api_flags(parser)
    add = parser.add_argument
    text = "Number of services that are reconciled concurrently. Default: %(default)s."
    add("--workers", type=int, default=DEFAULT_WORKERS, metavar="N", help=text)
    text = "URL of the liveness probe; /readyz and /metrics are served at the same address. Default: %(default)s."
    add("--liveness", metavar="URL", default="http://0.0.0.0:8080/healthz", help=text)
    add("--log-format", choices=("json", "text"), default="json", help="Format of log lines. Default: %(default)s.")
    return parser


def _add_list(parser: argparse.ArgumentParser, flag: str, text: str, **details: Any) -> None:
    """Add a flag that may be repeated."""
    parser.add_argument(flag, action="append", default=[], help=text, **details)


def _add_pod_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--engine-image", required=True, help="Image of engine pods, unless the spec of their service names one.")
    add("--router-image", required=True, help="Image of router pods, unless the spec of their service names one.")
    text = "Pull policy of --engine-image and --router-image. Default: that of Kubernetes."
    add("--image-pull-policy", choices=("Always", "IfNotPresent", "Never"), help=text)
    text = (
        "Name of a pull Secret in each service's namespace, which pods use beside those of the spec; may be repeated. "
        "Default: none."
    )
    _add_list(parser, "--image-pull-secret", text, dest="image_pull_secrets", metavar="NAME")
    text = "ClusterRole, or Role in each namespace, by which routers read EndpointSlices. Default: %(default)s."
    add("--router-role", default="ClusterRole/octavo-router", metavar="KIND/NAME", type=_role, help=text)
    add("--cluster-domain", default="cluster.local", help="DNS domain of the cluster. Default: %(default)s.")
    text = "Seconds for which terminating pods keep serving while proxies remove them. Default: %(default)s."
    add("--lame-duck", type=int, default=15, metavar="S", help=text)
    text = "Number of services rolled out at a time after a default image or pod setting changes. Default: %(default)s."
    add("--max-rollouts", type=int, default=1, metavar="N", help=text)
    text = "Let the platform, such as OpenShift, assign the user of engine and router pods. Default: user 10001."
    add("--no-fixed-user", action="store_true", help=text)
    text = (
        "Whether specs may give pods rights on their node, such as hostPath volumes and privileged containers. "
        "Default: %(default)s."
    )
    add("--pod-templates", choices=("restricted", "any"), default="restricted", help=text)
    text = "HTTPRoutes (Gateway API) for services with exposure.gateway. Default: off."
    add("--gateway-api", action="store_true", help=text)
    text = "LeaderWorkerSets for services with parallelism.nodes above 1. Default: off."
    add("--leader-worker-sets", action="store_true", help=text)


def _add_monitoring_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pod-monitors", action="store_true", help="PodMonitors of engines and routers. Default: off.")
    text = "Label of PodMonitors, by which Prometheus selects them; may be repeated. Default: none."
    _add_list(parser, "--monitor-label", text, dest="monitor_labels", metavar="NAME=VALUE", type=_label)
    text = (
        "Namespace whose Prometheus the NetworkPolicies of engines and routers admit to metrics; may be repeated. "
        "Default: none."
    )
    _add_list(parser, "--scraped-from", text, metavar="NAMESPACE")
    text = (
        "Peer in NetworkPolicies that may read metrics of engines and routers, as a JSON object with podSelector, "
        "namespaceSelector or ipBlock; may be repeated. Default: none."
    )
    _add_list(parser, "--scrape-peer", text, dest="scrape_peers", metavar="JSON", type=_json_object)


def _add_lease_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    namespace = os.environ.get("POD_NAMESPACE", "default")
    add("--lease-namespace", default=namespace, help="Namespace of operator and Lease. Default: %(default)s.")
    add("--lease-name", default="octavo-operator", help="Name of the Lease for leader election. Default: %(default)s.")
    identity = os.environ.get("POD_NAME") or os.uname().nodename
    text = "Name of this operator as holder of the Lease. Default: the name of the pod."
    add("--identity", default=identity, help=text)
    key = parser.add_mutually_exclusive_group(required=True)
    text = "Secret in --lease-namespace with the key from which routers' secrets are derived; created if missing."
    key.add_argument("--key-secret", metavar="NAME", help=text)
    key.add_argument("--key-file", type=Path, help="File with the key from which routers' secrets are derived.")


def _add_metrics_api_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = (
        "Port on which the operator serves custom metrics to the API server, for HorizontalPodAutoscalers; 0: the "
        "operator serves none and scales services itself. Default: %(default)s."
    )
    add("--metrics-api-port", type=int, default=0, metavar="PORT", help=text)
    text = (
        "Name, in --lease-namespace, of the Service of --metrics-api-port and of its certificate authority's Secret. "
        "Default: %(default)s."
    )
    add("--metrics-api-service", default="octavo-metrics-api", metavar="NAME", help=text)


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
        has_group_sets=args.leader_worker_sets,
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
