"""The kopf side: watches go into the view, whatever they touch into the queue. Nothing is decided here.

Not by kopf's indexes: with those it holds every object back until all are listed, and wakes all that wait for each
that comes, which took a minute of CPU for 500 services; whether all was seen, the census tells. No handler needs a
finalizer; nothing is kept in annotations.
"""

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from octavo_operator.cluster.pods import is_serving_router, state_port
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.kopf_runner import Resource
from octavo_operator.names import COMPONENT_LABEL, ROUTER, ROUTER_LABEL, SERVICE_LABEL
from octavo_operator.service import Settings
from octavo_operator.spec.service import GROUP, VERSION

SERVICES: Resource = (f"{GROUP}/{VERSION}", "inferenceservices")
CHILDREN: tuple[Resource, ...] = (
    ("apps/v1", "deployments"),
    ("v1", "services"),
    ("v1", "serviceaccounts"),
    ("v1", "persistentvolumeclaims"),
    ("v1", "pods"),
    ("networking.k8s.io/v1", "ingresses"),
    ("networking.k8s.io/v1", "networkpolicies"),
    ("policy/v1", "poddisruptionbudgets"),
    ("rbac.authorization.k8s.io/v1", "roles"),
    ("rbac.authorization.k8s.io/v1", "rolebindings"),
)
MONITORS: Resource = ("monitoring.coreos.com/v1", "podmonitors")
ROUTES: Resource = ("gateway.networking.k8s.io/v1", "httproutes")


def watched_resources(settings: Settings) -> tuple[Resource, ...]:
    """Without the services themselves."""
    extra = [MONITORS] * settings.has_pod_monitors + [ROUTES] * settings.has_gateway_api
    return (*CHILDREN, *extra)


class EventHandlers:
    """`on_watch_start`: called when a watch begins, be it anew, with something there."""

    def __init__(
        self,
        view: View,
        queue: WorkQueue[Key],
        reports: RouterReports,
        *,
        secret_of: Callable[[Key], str],
        on_watch_start: Callable[[], None],
    ) -> None:
        self._view = view
        self._queue = queue
        self._reports = reports
        self._secret_of = secret_of
        self._on_listing = on_watch_start

    def register(self, registry: kopf.OperatorRegistry, settings: Settings) -> None:
        for version, plural in (SERVICES, *watched_resources(settings)):
            matters = None if plural == SERVICES[1] else self._is_relevant
            kopf.on.event(version, plural, id=f"watch_{plural}", registry=registry, when=matters)(self._on_event)

    def forget(self, raw: Mapping[str, Any]) -> None:
        self._update_view(raw, is_gone=True)

    def _is_relevant(self, body: kopf.Body, **_: Any) -> bool:
        """Also what has our label no more: it was one of ours until somebody took it away."""
        return _is_labelled(body) or self._view.contains(body)

    async def _on_event(self, event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        if event["type"] is None:
            self._on_listing()
        self._update_view(body, is_gone=event["type"] == "DELETED")

    def _update_view(self, body: Mapping[str, Any], *, is_gone: bool) -> None:
        raw: Mapping[str, Any] = {**body}
        labels = raw["metadata"].get("labels") or {}
        if raw["kind"] == "Pod" and labels.get(COMPONENT_LABEL) == ROUTER:
            self._update_report(raw, labels.get(ROUTER_LABEL, ""), is_gone=is_gone)
        for key in self._view.update(raw, is_gone=is_gone):
            self._queue.add(key)

    def _update_report(self, raw: Mapping[str, Any], router: str, *, is_gone: bool) -> None:
        metadata = raw["metadata"]
        key, host = (metadata["namespace"], metadata["name"]), raw.get("status", {}).get("podIP")
        if is_gone or host is None:
            self._reports.unsubscribe(key)
        elif is_serving_router(raw):
            secret = self._secret_of((metadata["namespace"], router))
            self._reports.subscribe(key, (host, state_port(raw)), secret)


def _is_labelled(body: Mapping[str, Any]) -> bool:
    return SERVICE_LABEL in (body["metadata"].get("labels") or {})
