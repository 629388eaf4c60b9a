"""`EventLog`: writes event of a service as Events (events.k8s.io/v1), which `kubectl describe` shows.

An event is named after what it says, so that the same event again raises the count of the one that is there instead of
making another. It also notes at what it was seen, for a turn of a condition the version of the service: an operator
that died before it could write the status, and finds the same turn once more, tells it no second time.
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
MOST_BYTES = 1024  # of a note, by the API

Raw = Mapping[str, Any]


class EventRecorder:
    def __init__(self, cluster: Cluster, *, identity: str) -> None:
        self._cluster = cluster
        self._identity = identity

    async def record(self, service: Raw, event: ServiceEvent, *, seen_at: str) -> None:
        """Once for each `seen_at`. An event that the API server refuses is no reason to stop work."""
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
        there = await self._cluster.find("Event", metadata["namespace"], metadata["name"])
        if there is None:  # its time was over
            await self._cluster.create(manifest)
            return
        seen_at = metadata["annotations"][SEEN_AT]
        if (there["metadata"].get("annotations") or {}).get(SEEN_AT) == seen_at:
            return
        count = (there.get("series") or {"count": 1})["count"] + 1
        there["series"] = {"count": count, "lastObservedTime": manifest["eventTime"]}
        there["metadata"]["annotations"] = {SEEN_AT: seen_at}
        await self._cluster.replace(there)

    def _manifest(self, service: Raw, event: ServiceEvent, seen_at: str) -> dict[str, Any]:
        metadata = service["metadata"]
        said = "\0".join((metadata["uid"], event.action, event.reason, event.note))
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{hashlib.sha256(said.encode()).hexdigest()[:16]}",
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
