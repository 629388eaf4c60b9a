"""`Autoscaler`: writes the numbers of replicas that `Scaler` decides, by /scale of the InferenceServices.

Both operators follow the load of all services, so that a new leader knows how long they have been idle; only the leader
writes. A write names the version of the service that was read, so that it replaces no newer value.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.cluster.lease import Leadership
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.desired.autoscaler import provider_of
from octavo_operator.metrics import AutoscalingRow
from octavo_operator.observed import ScalingState
from octavo_operator.scaling.scaler import Scaler, Seen
from octavo_operator.scaling.service_load import ServiceLoad, service_load
from octavo_operator.service import Settings, read_running_parts, read_service
from octavo_operator.spec.autoscaling import Autoscaling
from octavo_operator.spec.service import InvalidSpec
from octavo_operator.timestamps import now_text

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
CONFLICT_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`total`: existing engine pods. `serving`: those that serve. `load`: None if it is unknown. `held`: requests that
    routers hold for a first replica, also if not every router has reported."""

    total: int = 0
    serving: int = 0
    load: ServiceLoad | None = None
    held: int = 0


class ServiceLoads:
    """The present load of each service, from the view and the reports of its routers."""

    def __init__(self, view: View, reports: RouterReports) -> None:
        self._view = view
        self._reports = reports

    def of(self, key: Key) -> ServiceLoad | None:
        """None if there is no such service, or if one of its ready routers has no fresh report."""
        return self.sample(key).load

    def sample(self, key: Key) -> Sample:
        raw = self._view.services.get(key)
        if raw is None:
            return Sample()
        service = read_running_parts(raw)
        router = self._view.router_of(service)
        fresh = self._reports.fresh(service.namespace, self._view.router_pods(router))
        pods, models = self._view.engine_pods(key), self._view.models_of(key)
        admitted = [pod.name for pod in pods if pod.is_admitted and not pod.is_terminating]
        return Sample(
            total=len(pods),
            serving=sum(pod.serves for pod in pods),
            load=service_load(models, admitted, self._view.serving_routers(router, fresh)),
            held=sum(report.held.get(model, 0) for report in fresh.values() for model in models),
        )


@dataclass(slots=True)
class _Followed:
    """A service with autoscaling. `version`: uid and generation of the manifest from which `spec` was read."""

    version: tuple[str, int]
    spec: Autoscaling
    scaler: Scaler
    state: ScalingState | None = None
    load: ServiceLoad | None = None
    wakes: int = 0


class Autoscaler:
    def __init__(
        self,
        cluster: Cluster,
        view: View,
        loads: ServiceLoads,
        *,
        settings: Callable[[], Settings],
        leadership: Leadership,
        queue: WorkQueue[Key],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._loads = loads
        self._settings = settings
        self._leadership = leadership
        self._queue = queue
        self._clock = clock
        self._followed: dict[Key, _Followed] = {}
        self._due: set[Key] = set()
        self._is_due = asyncio.Event()

    def state_of(self, key: Key) -> ScalingState | None:
        """Return the latest decision about a service; None without autoscaling. A new service is decided at once, so
        that its first status is right."""
        if key not in self._followed:
            self._decide(key)
        followed = self._followed.get(key)
        return None if followed is None else followed.state

    def rows(self) -> Iterator[AutoscalingRow]:
        """The figures of each service for the metrics."""
        for (namespace, name), service in self._followed.items():
            state, load = service.state, service.load
            if state is None:
                continue
            yield AutoscalingRow(
                namespace=namespace,
                infsvc=name,
                desired_replicas=state.desired,
                max_replicas=service.spec.max_replicas,
                kv_used_replicas=None if load is None else load.kv_used_replicas,
                waiting_requests=None if load is None else load.waiting_requests,
                num_wakes=service.wakes,
                wake_s=state.wake_s,
            )

    def look(self, key: Key) -> None:
        """Decide about a service at once, as a router holds its first request."""
        if key in self._followed:
            self._due.add(key)
            self._is_due.set()

    async def run(self) -> None:
        """Decide about services with autoscaling periodically until cancelled."""
        loop_time = asyncio.get_running_loop().time
        all_at_s = loop_time()
        while True:
            due, self._due = self._due, set()  # `look` may add services meanwhile
            self._is_due.clear()
            if loop_time() >= all_at_s:
                due, all_at_s = {*self._view.services, *self._followed}, loop_time() + LOOK_EVERY_S
            for key in due:
                await self._try_step(key)
            try:
                async with asyncio.timeout_at(min(all_at_s, loop_time() + CONFLICT_S) if self._due else all_at_s):
                    await self._is_due.wait()
            except TimeoutError:
                pass

    async def _try_step(self, key: Key) -> None:
        """Decide about one service. After a conflict, the service is due again: the view soon has its new version."""
        try:
            await self.step(key)
        except (ApiError, OSError, TimeoutError) as error:
            logger.warning("%s/%s: the number of replicas was not written: %s", *key, error)
            if isinstance(error, ApiError) and error.is_conflict:
                self._due.add(key)
        except Exception:
            logger.exception("%s/%s: a bug in the operator, please report it", *key)

    async def step(self, key: Key) -> None:
        """Decide about one service and write the decision. Raises ApiError; the next step tries again."""
        raw, before = self._view.services.get(key), self._followed.get(key)
        state_before = None if before is None else before.state
        followed = self._decide(key)
        if raw is None or followed is None or followed.state is None:
            return
        state, replicas = followed.state, raw["spec"].get("replicas", 1)
        try:
            if state.desired != replicas and self._leadership.may_write:
                logger.info("%s/%s: scales from %d to %d replicas: %s", *key, replicas, state.desired, state.message)
                await self._cluster.scale_service(*key, state.desired, version=raw["metadata"]["resourceVersion"])
                followed.scaler.wrote(followed.spec, state.desired, self._clock())
                followed.wakes += replicas == 0
        finally:
            if state != state_before:  # only now, as a write of the status gives the service a new version
                self._queue.add(key)

    def _decide(self, key: Key) -> _Followed | None:
        """Decide about one service by its present load; None if it has no autoscaling that can be read."""
        raw = self._view.services.get(key)
        followed = None if raw is None else self._follow(key, raw)
        if raw is None or followed is None:
            self._followed.pop(key, None)
            return None
        sample = self._loads.sample(key)
        seen = Seen(
            replicas=raw["spec"].get("replicas", 1),
            total=sample.total,
            serving=sample.serving,
            load=sample.load,
            held=sample.held,
            now_s=self._clock(),
            now=now_text(),
        )
        followed.state = followed.scaler.step(followed.spec, provider_of(followed.spec, self._settings()), seen)
        followed.load = sample.load
        return followed

    def _follow(self, key: Key, raw: Mapping[str, Any]) -> _Followed | None:
        """The record of the service; None without autoscaling, or with a spec that can't be read."""
        metadata, spec = raw["metadata"], raw.get("spec") or {}
        if "deletionTimestamp" in metadata or not spec.get("autoscaling"):
            return None
        known, version = self._followed.get(key), (metadata["uid"], metadata["generation"])
        if known is not None and known.version == version:
            return known
        try:
            read = read_service(raw).spec.autoscaling
        except InvalidSpec:
            return None
        assert read is not None
        if known is not None and known.version[0] == version[0]:
            known.version, known.spec = version, read
            return known
        before = (raw.get("status") or {}).get("autoscaling") or {}
        scaler = Scaler(self._clock(), wake_s=before.get("wakeSeconds"), last_active=before.get("lastActive"))
        self._followed[key] = _Followed(version, read, scaler)
        return self._followed[key]
