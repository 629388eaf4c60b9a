"""What the operator is told when it is started."""

import argparse
import os
from pathlib import Path

from octavo_operator.service import Settings

DEFAULT_WORKERS = 16


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo-operator", description="Keeps InferenceServices as their specs say.", allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--namespace",
        action="append",
        dest="namespaces",
        help="watch this namespace; may be given again (default: all)",
    )
    add("--engine-image", required=True, help="image of engine pods whose spec names none")
    add("--router-image", required=True, help="image of router pods whose spec names none")
    add("--image-pull-policy", choices=("Always", "IfNotPresent", "Never"), help="of those images")
    add(
        "--image-pull-secret",
        action="append",
        dest="image_pull_secrets",
        default=[],
        metavar="NAME",
        help="Secret to pull with, in the namespace of each service whose spec names none; may be given again",
    )
    add("--cluster-domain", default="cluster.local", help="(default: %(default)s)")
    add("--lame-duck", type=int, default=15, metavar="S", help="seconds that ending pods go on answering (default: 15)")
    add("--pod-monitors", action="store_true", help="the cluster has the Prometheus operator's PodMonitors")
    add(
        "--monitor-label",
        action="append",
        dest="monitor_labels",
        default=[],
        metavar="NAME=VALUE",
        type=_label,
        help="of those PodMonitors, for a Prometheus that selects them by it; may be given again",
    )
    add(
        "--scraped-from",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="namespace whose Prometheus NetworkPolicies let in to engines and routers; may be given again",
    )
    add("--gateway-api", action="store_true", help="the cluster has the Gateway API's HTTPRoutes")
    namespace = os.environ.get("POD_NAMESPACE", "default")
    add("--lease-namespace", default=namespace, help="namespace of the operator and its Lease (default: %(default)s)")
    add("--lease-name", default="octavo-operator", help="(default: %(default)s)")
    add("--identity", default=os.environ.get("POD_NAME") or os.uname().nodename, help="who holds it (default: the pod)")
    key = parser.add_mutually_exclusive_group(required=True)
    key.add_argument(
        "--key-secret",
        metavar="NAME",
        help="Secret, beside the Lease, with the key that routers' secrets are derived from; made if it is not there",
    )
    key.add_argument("--key-file", type=Path, help="file with that key")
    add("--workers", type=int, default=DEFAULT_WORKERS, metavar="N", help="services at once (default: %(default)s)")
    add("--liveness", metavar="URL", default="http://0.0.0.0:8080/healthz", help="(default: %(default)s)")
    add("--log-format", choices=("json", "text"), default="json", help="(default: %(default)s)")
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(
        engine_image=args.engine_image,
        router_image=args.router_image,
        operator_namespace=args.lease_namespace,
        image_pull_policy=args.image_pull_policy,
        image_pull_secrets=tuple(args.image_pull_secrets),
        cluster_domain=args.cluster_domain,
        lame_duck_s=args.lame_duck,
        has_pod_monitors=args.pod_monitors,
        monitor_labels=dict(args.monitor_labels),
        scraped_from=tuple(args.scraped_from),
        has_gateway_api=args.gateway_api,
    )


def _label(text: str) -> tuple[str, str]:
    name, is_there, value = text.partition("=")
    if not name or not is_there:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value
