"""`Writer`: executes one action of a plan, or returns the reason why the object was not written.

It never overwrites an object of another owner: an object that was not observed is applied on the condition that it does
not exist; if it exists after all, its owner is checked first.
"""

import logging
from collections.abc import Mapping
from typing import Any

from octavo_operator.cluster.client import ApiError, Cluster, is_of_one_object, is_transient
from octavo_operator.cluster.view import View
from octavo_operator.names import ADMITTED_GATE, DRAINING
from octavo_operator.observed import Ref, Refusal
from octavo_operator.plan.actions import Action, Apply, CreateOnce, Delete, NotifyPod, SetGate, SetReplicas
from octavo_operator.plan.owner import is_ours, name_taken
from octavo_operator.service import ServiceIdentity

logger = logging.getLogger(__name__)


class Writer:
    def __init__(self, cluster: Cluster, view: View) -> None:
        self._cluster = cluster
        self._view = view

    async def execute(self, service: ServiceIdentity, action: Action, *, now: str) -> tuple[Ref, Refusal] | None:
        """Execute an action; return the object and the reason if it was not written.

        Raises ApiError for a conflict with another write and if the API server can't be used at the moment.
        """
        logger.info("%s/%s: %s", service.namespace, service.name, described(action))
        try:
            refusal = await self._write(service, action, now=now)
        except ApiError as error:
            if not is_transient(error):
                return _ref(action), Refusal("Refused", str(error))
            if not is_of_one_object(error):
                raise
            return _ref(action), Refusal("Retrying", str(error))
        return None if refusal is None else (_ref(action), refusal)

    async def _write(self, service: ServiceIdentity, action: Action, *, now: str) -> Refusal | None:
        match action:
            case Apply(manifest, is_new=True):
                return await self._apply_new(service, dict(manifest))
            case Apply(manifest):
                self._update_view(await self._cluster.apply(manifest), manifest)
            case CreateOnce(manifest):
                return await self._create(service, manifest)
            case Delete(kind, name, uid, version):
                await self._cluster.delete(kind, service.namespace, name, uid, version)
            case SetGate(pod, uid, epoch):
                condition = gate_condition(action, now=now)
                await self._cluster.set_gate(service.namespace, pod, uid, epoch=epoch, condition=condition)
            case NotifyPod(pod, uid, digest):
                await self._cluster.notify_pod(service.namespace, pod, uid, digest=digest)
            case SetReplicas(kind, name, uid, replicas):
                written = await self._cluster.set_replicas(kind, service.namespace, name, uid, replicas)
                self._view.update({**written, "kind": kind})
        return None

    async def _create(self, service: ServiceIdentity, manifest: Mapping[str, Any]) -> Refusal | None:
        kind, metadata = manifest["kind"], manifest["metadata"]
        if await self._cluster.create(manifest) or kind == "Secret":  # Secrets of services can't be read
            return None
        live = await self._cluster.find(kind, metadata["namespace"], metadata["name"])
        return None if live is None or is_ours(live, service) else name_taken(live)

    async def _apply_new(self, service: ServiceIdentity, manifest: dict[str, Any]) -> Refusal | None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        try:
            self._update_view(await self._cluster.apply_new(manifest), manifest)
        except ApiError as error:
            if not error.is_conflict:
                raise
            live = await self._cluster.find(kind, service.namespace, name)
            if live is None:
                raise
            if not is_ours(live, service):
                return name_taken(live)
            self._update_view(await self._cluster.apply(manifest), manifest)
        return None

    def _update_view(self, response: dict[str, Any], sent: Mapping[str, Any]) -> None:
        """Update the view at once, so that the next plan doesn't repeat the write if the watch delivers it late."""
        self._view.update_written(sent, {**response, "kind": sent["kind"]})


def gate_condition(action: SetGate, *, now: str) -> dict[str, str]:
    """The condition of the pod's readiness gate."""
    return {
        "type": ADMITTED_GATE,
        "status": "False" if action.epoch is None else "True",
        "reason": "Admitted" if action.epoch else DRAINING if action.drains else "Withdrawn",
        "message": action.reason,
        "lastTransitionTime": now,
    }


def described(action: Action) -> str:
    match action:
        case Apply(manifest, reason):
            return f"applies {manifest['kind']} {manifest['metadata']['name']}: {reason}"
        case CreateOnce(manifest, reason):
            return f"creates {manifest['kind']} {manifest['metadata']['name']}: {reason}"
        case Delete(kind, name, reason=reason):
            return f"deletes {kind} {name}: {reason}"
        case SetGate(pod, _, epoch, reason, drains):
            return f"{'admits' if epoch else 'drains' if drains else 'withdraws'} pod {pod}: {reason}"
        case NotifyPod(pod, _, _, reason):
            return f"notifies pod {pod}: {reason}"
        case SetReplicas(kind, name, _, replicas, reason):
            return f"scales {kind} {name} to {replicas}: {reason}"


def _ref(action: Action) -> Ref:
    match action:
        case Apply(manifest) | CreateOnce(manifest):
            return manifest["kind"], manifest["metadata"]["name"]
        case Delete(kind, name) | SetReplicas(kind, name):
            return kind, name
        case SetGate(pod) | NotifyPod(pod):
            return "Pod", pod
