"""`EventRecorder`: writes Kubernetes Events (events.k8s.io/v1) about a service, which `kubectl describe` shows.

The name of an Event is a hash of its content, so that a repetition raises the count of the existing Event. An
annotation holds the last record's `seen_at`, which for a condition's transition is the service's resourceVersion: if an
operator died before it wrote the status, the next one finds the same transition and does not count it again.
"""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from octavo_operator.cluster.client import ApiError, Cluster, is_transient
from octavo_operator.names import MANAGER
from octavo_operator.plan.events import ServiceEvent
from octavo_operator.spec.service import GROUP, KIND, VERSION
from octavo_operator.timestamps import now_text

logger = logging.getLogger(__name__)

SEEN_AT = f"{GROUP}/seen-at"
MOST_BYTES = 1024  # limit of the Kubernetes API for the note of an Event

Raw = Mapping[str, Any]


class EventRecorder:
    def __init__(self, cluster: Cluster, *, identity: str) -> None:
        self._cluster = cluster
        self._identity = identity

    async def record(self, service: Raw, event: ServiceEvent, *, seen_at: str) -> None:
        """Write the event once for each `seen_at`. A refusal by the API server is only logged: the work continues."""
        manifest = self._manifest(service, event, seen_at)
        try:
            if not await self._cluster.create(manifest):
                await self._repeat(manifest)
        except ApiError as error:
            if is_transient(error):
                raise
            logger.warning("an event can't be written: %s", error)

    async def _repeat(self, manifest: dict[str, Any]) -> None:
        metadata = manifest["metadata"]
        existing = await self._cluster.find("Event", metadata["namespace"], metadata["name"])
        if existing is None:  # the Event has expired
            await self._cluster.create(manifest)
            return
        seen_at = metadata["annotations"][SEEN_AT]
        if (existing["metadata"].get("annotations") or {}).get(SEEN_AT) == seen_at:
            return
        count = (existing.get("series") or {"count": 1})["count"] + 1
        existing["series"] = {"count": count, "lastObservedTime": manifest["eventTime"]}
        existing["metadata"]["annotations"] = {SEEN_AT: seen_at}
        await self._cluster.replace(existing)

    def _manifest(self, service: Raw, event: ServiceEvent, seen_at: str) -> dict[str, Any]:
        metadata = service["metadata"]
        content = "\0".join((metadata["uid"], event.action, event.reason, event.note))
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
                "namespace": metadata["namespace"],
                "annotations": {SEEN_AT: seen_at},
            },
            "eventTime": now_text("microseconds"),
            "reportingController": f"{GROUP}/{MANAGER}",
            "reportingInstance": self._identity[:128],
            "regarding": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "action": event.action,
            "reason": event.reason,
            "note": event.note.encode()[:MOST_BYTES].decode(errors="ignore"),
            "type": event.type,
        }
