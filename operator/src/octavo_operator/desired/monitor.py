"""PodMonitors, for clusters with the Prometheus operator."""

import re

from octavo_operator.desired.objects import Manifest, child
from octavo_operator.names import ADMIN, ENGINE, HTTP, ROUTER, SERVICE_LABEL, engine_selector, router_selector
from octavo_operator.service import InferenceService, Settings

_LABEL = re.sub(r"[^a-z]", "_", SERVICE_LABEL)


def desired_monitors(service: InferenceService, settings: Settings) -> list[Manifest]:
    if not settings.has_pod_monitors:
        return []
    monitors = [_monitor(service, settings, ENGINE, selector=engine_selector(service.name), port=HTTP)]
    if service.owns_router:
        monitors.append(_monitor(service, settings, ROUTER, selector=router_selector(service.name), port=ADMIN))
    return monitors


def _monitor(
    service: InferenceService, settings: Settings, component: str, *, selector: dict[str, str], port: str
) -> Manifest:
    """PodMonitor of one component's pods. Its series get the label `infsvc`, from the service label of the pod."""
    named = {"sourceLabels": [f"__meta_kubernetes_pod_label_{_LABEL}"], "targetLabel": "infsvc"}
    manifest = child(
        service,
        "monitoring.coreos.com/v1",
        "PodMonitor",
        f"{service.name}-{component}",
        component=component,
        spec={
            "selector": {"matchLabels": selector},
            "podMetricsEndpoints": [{"port": port, "path": "/metrics", "interval": "15s", "relabelings": [named]}],
        },
    )
    manifest["metadata"]["labels"] = settings.monitor_labels | manifest["metadata"]["labels"]
    return manifest
