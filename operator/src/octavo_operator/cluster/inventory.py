"""`Inventory`: compares the view with the cluster by the uids of all objects, which are cheap to list.

A watch that restarts after a long interruption does not report the deletions that it missed: deleted services would
keep their hosts and routers forever. And no plan may be made before the view has every existing object.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo_operator.cluster.client import KINDS, ApiError, Cluster, is_found
from octavo_operator.cluster.view import View
from octavo_operator.names import SERVICE_LABEL
from octavo_operator.spec.service import KIND


async def is_served(cluster: Cluster, kind: str, namespace: str | None) -> bool:
    return await is_found(cluster.list_uids(kind, namespace, label=SERVICE_LABEL))


class Inventory:
    """`namespaces`: watched namespaces, empty for all. `remove`: called with each object that only the view has.
    `mark_missing`: called with a kind that is not served any more; returns whether the operator can work without it."""

    def __init__(
        self,
        cluster: Cluster,
        view: View,
        *,
        kinds: Sequence[str],
        namespaces: Sequence[str],
        remove: Callable[[Mapping[str, Any]], None],
        mark_missing: Callable[[str], bool],
    ) -> None:
        self._mark_missing = mark_missing
        self._cluster = cluster
        self._view = view
        self._kinds = list(kinds)
        self._namespaces = namespaces
        self._remove = remove

    def add_kind(self, kind: str) -> None:
        self._kinds.append(kind)

    async def find_missing(self) -> set[str]:
        """Return uids of objects in the cluster that the view lacks; remove objects that only the view has."""
        before = list(self._view.objects())
        uids: set[str] = set()
        for kind in tuple(self._kinds):
            for namespace in self._namespaces or (None,):
                uids |= await self._uids(kind, namespace)
        for raw in before:
            if raw["metadata"]["uid"] not in uids:
                self._remove(raw)
        return uids - {raw["metadata"]["uid"] for raw in self._view.objects()}

    async def _uids(self, kind: str, namespace: str | None) -> set[str]:
        try:
            return await self._cluster.list_uids(kind, namespace, label="" if kind == KIND else SERVICE_LABEL)
        except ApiError as error:
            if not error.is_gone:
                raise
            if self._mark_missing(kind):
                self._kinds.remove(kind)
                return set()
            what = f"the cluster does not serve {'.'.join(reversed(KINDS[kind]))} any more: install the CRD again"
            raise ApiError(error.status, "NotServed", what) from error
