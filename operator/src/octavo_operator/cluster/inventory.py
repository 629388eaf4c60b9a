"""`Census`: holds the view against what there is, by the uids of all objects, which is little to ask for.

A watch that was cut off for long, and begins anew, doesn't tell what was deleted meanwhile: such ghosts would hold
their hosts and routers for ever. And until all that there is has come into the view, nothing may be planned by it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo_operator.cluster.client import KINDS, ApiError, Cluster
from octavo_operator.cluster.view import View
from octavo_operator.names import SERVICE_LABEL
from octavo_operator.spec.service import KIND


async def is_served(cluster: Cluster, kind: str, namespace: str | None) -> bool:
    """Whether the API server knows the kind."""
    try:
        await cluster.list_uids(kind, namespace, label=SERVICE_LABEL)
    except ApiError as error:
        if not error.is_gone:
            raise
        return False
    return True


class Inventory:
    """`namespaces`: empty for all. `forget`: called with each object that is in the view and nowhere else."""

    def __init__(
        self,
        cluster: Cluster,
        view: View,
        *,
        kinds: Sequence[str],
        namespaces: Sequence[str],
        forget: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._kinds = kinds
        self._namespaces = namespaces
        self._forget = forget

    async def find_missing(self) -> set[str]:
        """The uids of what is there and not in the view."""
        before = list(self._view.objects())
        found: set[str] = set()
        for kind in self._kinds:
            for namespace in self._namespaces or (None,):
                found |= await self._uids(kind, namespace)
        for raw in before:
            if raw["metadata"]["uid"] not in found:
                self._forget(raw)
        return found - {raw["metadata"]["uid"] for raw in self._view.objects()}

    async def _uids(self, kind: str, namespace: str | None) -> set[str]:
        try:
            return await self._cluster.list_uids(kind, namespace, label="" if kind == KIND else SERVICE_LABEL)
        except ApiError as error:
            if not error.is_gone:
                raise
            what = f"the cluster does not serve {'.'.join(reversed(KINDS[kind]))} any more: install its CRD again"
            raise ApiError(error.status, "NotServed", what) from error
