"""kopf's event handlers: update the view with each watched object and queue the services that it concerns.

kopf's indexes are not used: they hold every object back until all are listed and wake all waiting tasks for each
object, which took a minute of CPU for 500 services. `Resync` finds out instead whether the view is complete. No handler
needs a finalizer or stores data in annotations.
"""

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from octavo_operator.cluster.pods import is_serving_router, state_port
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.desired.engine import GROUP_API
from octavo_operator.desired.service_secrets import ServiceSecrets
from octavo_operator.kopf_runner import Resource
from octavo_operator.names import COMPONENT_LABEL, ROUTER, ROUTER_LABEL, SERVICE_LABEL
from octavo_operator.service import Settings
from octavo_operator.spec.service import GROUP, VERSION

SERVICES: Resource = (f"{GROUP}/{VERSION}", "inferenceservices")
CHILDREN: tuple[Resource, ...] = (
    ("apps/v1", "deployments"),
    ("v1", "services"),
    ("v1", "serviceaccounts"),
    ("v1", "configmaps"),
    ("v1", "persistentvolumeclaims"),
    ("v1", "pods"),
    ("networking.k8s.io/v1", "ingresses"),
    ("networking.k8s.io/v1", "networkpolicies"),
    ("policy/v1", "poddisruptionbudgets"),
    ("rbac.authorization.k8s.io/v1", "rolebindings"),
)
AUTOSCALERS: Resource = ("autoscaling/v2", "horizontalpodautoscalers")
MONITORS: Resource = ("monitoring.coreos.com/v1", "podmonitors")
GROUP_SETS: Resource = (GROUP_API, "leaderworkersets")
ROUTES: Resource = ("gateway.networking.k8s.io/v1", "httproutes")


def watched_resources(settings: Settings) -> tuple[Resource, ...]:
    """Return the kinds of children to watch, without InferenceServices, which are watched in any case."""
    wanted = {
        MONITORS: settings.has_pod_monitors,
        ROUTES: settings.has_gateway_api,
        GROUP_SETS: settings.has_group_sets,
        AUTOSCALERS: settings.has_metrics_api,
    }
    return (*CHILDREN, *(resource for resource, is_wanted in wanted.items() if is_wanted))


class EventHandlers:
    """`on_watch_start`: called for each object that a new or restarted watch lists."""

    def __init__(
        self,
        view: View,
        queue: WorkQueue[Key],
        reports: RouterReports,
        *,
        secrets_of: Callable[[Key], ServiceSecrets],
        on_watch_start: Callable[[], None],
    ) -> None:
        self._view = view
        self._queue = queue
        self._reports = reports
        self._secrets_of = secrets_of
        self._on_watch_start = on_watch_start

    def register(self, registry: kopf.OperatorRegistry, settings: Settings) -> None:
        for version, plural in (SERVICES, *watched_resources(settings)):
            relevant = None if plural == SERVICES[1] else self._is_relevant
            kopf.on.event(version, plural, id=f"watch_{plural}", registry=registry, when=relevant)(self._on_event)

    def remove(self, raw: Mapping[str, Any]) -> None:
        self._update_view(raw, is_gone=True)

    def _is_relevant(self, body: kopf.Body, **_: Any) -> bool:
        """Return whether the object has the service label, or had it when the view stored the object."""
        return _is_labelled(body) or self._view.contains(body)

    async def _on_event(self, event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        if event["type"] is None:
            self._on_watch_start()
        self._update_view(body, is_gone=event["type"] == "DELETED")

    def _update_view(self, body: Mapping[str, Any], *, is_gone: bool) -> None:
        raw: Mapping[str, Any] = {**body}
        labels = raw["metadata"].get("labels") or {}
        if raw["kind"] == "Pod" and labels.get(COMPONENT_LABEL) == ROUTER:
            self._update_subscription(raw, labels.get(ROUTER_LABEL, ""), is_gone=is_gone)
        for key in self._view.update(raw, is_gone=is_gone):
            self._queue.add(key)

    def _update_subscription(self, raw: Mapping[str, Any], router: str, *, is_gone: bool) -> None:
        metadata = raw["metadata"]
        key, host = (metadata["namespace"], metadata["name"]), raw.get("status", {}).get("podIP")
        if is_gone or host is None:
            self._reports.unsubscribe(key)
        elif is_serving_router(raw):
            secrets = self._secrets_of((metadata["namespace"], router))
            self._reports.subscribe(key, (host, state_port(raw)), (secrets.admin, secrets.shared))


def _is_labelled(body: Mapping[str, Any]) -> bool:
    return SERVICE_LABEL in (body["metadata"].get("labels") or {})
