"""`OptionalApis`: kinds of other projects that the settings ask for and that the cluster may not serve, or not yet.

While such a kind is missing, the settings that need it are off, and the operator asks for it periodically: its CRD may
be installed after the operator, or be away only while the operator starts.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from octavo_operator.cluster.client import Cluster
from octavo_operator.cluster.inventory import is_served
from octavo_operator.names import GROUP_SET
from octavo_operator.resync import retry_until_ok
from octavo_operator.service import Settings

logger = logging.getLogger(__name__)

ASK_EVERY_S = 30.0
POD_MONITOR, HTTP_ROUTE = "PodMonitor", "HTTPRoute"
OPTIONAL = (POD_MONITOR, HTTP_ROUTE, GROUP_SET)


class OptionalApis:
    """`namespaces`: empty for all."""

    def __init__(self, cluster: Cluster, wanted: Settings, namespaces: Sequence[str]) -> None:
        self.wanted = wanted
        self._cluster = cluster
        self._namespace = namespaces[0] if namespaces else None
        self._missing: list[str] = []
        self.serves_metrics: Callable[[], bool] = lambda: False  # HPAs get their metrics from this operator

    @property
    def settings(self) -> Settings:
        """The wanted settings without those that need a missing kind."""
        return replace(
            self.wanted,
            has_pod_monitors=self.wanted.has_pod_monitors and POD_MONITOR not in self._missing,
            has_gateway_api=self.wanted.has_gateway_api and HTTP_ROUTE not in self._missing,
            has_group_sets=self.wanted.has_group_sets and GROUP_SET not in self._missing,
            has_metrics_api=self.wanted.has_metrics_api and self.serves_metrics(),
        )

    async def ask(self) -> None:
        """Find the kinds that are missing at the start. Raises ApiError."""
        wanted = (self.wanted.has_pod_monitors, self.wanted.has_gateway_api, self.wanted.has_group_sets)
        asked = (kind for kind, is_wanted in zip(OPTIONAL, wanted, strict=True) if is_wanted)
        self._missing = [kind for kind in asked if not await self._is_served(kind)]
        for kind in self._missing:
            level = logging.INFO if kind == GROUP_SET else logging.WARNING  # sets are allowed by default
            what = "there are no %ss in this cluster: the operator creates none until their CRD exists"
            logger.log(level, what, kind)

    def mark_missing(self, kind: str) -> bool:
        """Note that the cluster does not serve this kind any more; return False if the operator needs it."""
        if kind in OPTIONAL and kind not in self._missing:
            logger.warning("the cluster does not serve %ss any more: the operator creates none", kind)
            self._missing.append(kind)
        return kind in OPTIONAL

    async def ask_until_cancelled(self, on_found: Callable[[str], None]) -> None:
        """Ask for missing kinds. `on_found`: called with each kind that is found."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            for kind in tuple(self._missing):
                if await retry_until_ok(partial(self._is_served, kind)):
                    logger.info("the cluster serves %ss now", kind)
                    self._missing.remove(kind)
                    on_found(kind)

    async def _is_served(self, kind: str) -> bool:
        return await is_served(self._cluster, kind, self._namespace)
