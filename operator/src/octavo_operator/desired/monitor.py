"""PodMonitors, where the Prometheus operator is there to read them."""

from octavo_operator.desired.objects import Manifest, child
from octavo_operator.names import ENGINE, ROUTER, engine_selector, router_selector
from octavo_operator.service import Service, Settings


def desired_monitors(service: Service, settings: Settings) -> list[Manifest]:
    if not settings.has_pod_monitors:
        return []
    monitors = [_monitor(service, ENGINE, engine_selector(service.name))]
    if service.owns_router:
        monitors.append(_monitor(service, ROUTER, router_selector(service.name)))
    return monitors


def _monitor(service: Service, component: str, selector: dict[str, str]) -> Manifest:
    return child(
        service,
        "monitoring.coreos.com/v1",
        "PodMonitor",
        f"{service.name}-{component}",
        component=component,
        spec={
            "selector": {"matchLabels": selector},
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    )
