"""The kopf side: watches go into the view, whatever they touch into the queue. Nothing is decided here.

Every kind is declared as an index as well: kopf calls event handlers only once all indexed kinds are listed, so that no
service is planned for on half a view. No handler needs a finalizer; nothing is kept in annotations.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import kopf

from octavo_operator.cluster.pods import is_serving_router
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.names import COMPONENT_LABEL, ROUTER, ROUTER_LABEL, SERVICE_LABEL
from octavo_operator.service import Settings
from octavo_operator.spec.service import GROUP, VERSION

logger = logging.getLogger(__name__)

#: group and version, plural
Resource = tuple[str, str]
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


def watched(settings: Settings) -> tuple[Resource, ...]:
    extra = [MONITORS] * settings.has_pod_monitors + [ROUTES] * settings.has_gateway_api
    return (*CHILDREN, *extra)


class Watching:
    def __init__(
        self, view: View, queue: WorkQueue[Key], reports: RouterReports, secret_of: Callable[[Key], str]
    ) -> None:
        self._view = view
        self._queue = queue
        self._reports = reports
        self._secret_of = secret_of

    def register(self, registry: kopf.OperatorRegistry, settings: Settings) -> None:
        for version, plural in ((f"{GROUP}/{VERSION}", "inferenceservices"), *watched(settings)):
            labels = None if plural == "inferenceservices" else {SERVICE_LABEL: kopf.PRESENT}
            kopf.index(version, plural, id=f"list_{plural}", registry=registry, labels=labels)(self._listed)
            matters = None if labels is None else self._matters
            kopf.on.event(version, plural, id=f"watch_{plural}", registry=registry, when=matters)(self._seen)

    def _matters(self, body: kopf.Body, **_: Any) -> bool:
        """Also what has our label no more: it was one of ours until somebody took it away."""
        return SERVICE_LABEL in body["metadata"].get("labels", {}) or self._view.has(body)

    async def _listed(self, body: kopf.Body, **_: Any) -> None:
        self._take(body, is_gone=False)

    async def _seen(self, event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        for key in self._take(body, is_gone=event["type"] == "DELETED"):
            self._queue.add(key)

    def _take(self, body: Mapping[str, Any], *, is_gone: bool) -> set[Key]:
        raw = {**body, "metadata": {k: v for k, v in body["metadata"].items() if k != "managedFields"}}
        labels = raw["metadata"].get("labels") or {}
        if raw["kind"] == "Pod" and labels.get(COMPONENT_LABEL) == ROUTER:
            self._follow(raw, labels.get(ROUTER_LABEL, ""), is_gone=is_gone)
        return self._view.see(raw, is_gone=is_gone)

    def _follow(self, raw: Mapping[str, Any], router: str, *, is_gone: bool) -> None:
        metadata = raw["metadata"]
        key, address = (metadata["namespace"], metadata["name"]), raw.get("status", {}).get("podIP")
        if is_gone or address is None:
            self._reports.forget(key)
        elif is_serving_router(raw):
            self._reports.follow(key, address, self._secret_of((metadata["namespace"], router)))
