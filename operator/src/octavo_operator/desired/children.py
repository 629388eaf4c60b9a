"""The child objects of a service, except its engine Deployments, whose number and revisions the plan decides."""

import re
from collections.abc import Collection, Mapping

from octavo_operator.desired.adapters import desired_adapters
from octavo_operator.desired.autoscaler import desired_autoscaler
from octavo_operator.desired.network import desired_network
from octavo_operator.desired.objects import Manifest, child
from octavo_operator.desired.router import desired_engine_budget, desired_engine_identity, desired_router
from octavo_operator.desired.weights import desired_claim
from octavo_operator.names import ADMIN, ENGINE, HTTP, ROUTER, SERVICE_LABEL, engine_selector, router_selector
from octavo_operator.observed import ServiceBehind
from octavo_operator.service import InferenceService, Settings

_LABEL = re.sub(r"[^a-z]", "_", SERVICE_LABEL)


def desired_children(
    service: InferenceService,
    settings: Settings,
    *,
    router_template: str | None = None,
    behind_router: Mapping[str, ServiceBehind] | None = None,
    taken_models: Collection[str] = (),
) -> list[Manifest]:
    """Manifests in the order of creation: objects that pods refer to come before the pods. `router_template`: revision
    of the live router's pod template. `behind_router`: the services behind it; by default this service. `taken_models`:
    names of its model and adapters that belong to other services."""
    live = () if router_template is None else (router_template,)
    behind = behind_router or {service.name: ServiceBehind(service.served_names, service.adapter_names)}
    return [
        *desired_claim(service),
        *desired_adapters(service, taken_models),
        desired_engine_identity(service),
        *desired_network(service, settings),
        *desired_router(service, settings, live, behind),
        desired_engine_budget(service),
        *desired_autoscaler(service, settings),
        *_monitors(service, settings),
    ]


def _monitors(service: InferenceService, settings: Settings) -> list[Manifest]:
    if not settings.has_pod_monitors:  # the cluster has the Prometheus operator
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
