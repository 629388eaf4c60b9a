"""`Reconciler`: gets a service from the queue, makes a plan, executes it, records events and writes the status.

A failure affects one service only, which is queued again and gets a new plan. Before each write, the operator checks
that it still leads. If an action is refused or fails, the other actions are still executed; the status shows the
reason, and the service is retried later.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.cluster.event_recorder import EventRecorder
from octavo_operator.cluster.lease import Leadership
from octavo_operator.cluster.pod_events import PodSetupEvents
from octavo_operator.cluster.pods import is_quota_exceeded, missing_secrets
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.cluster.writer import Writer
from octavo_operator.desired.service_secrets import ServiceSecrets
from octavo_operator.metrics import Telemetry
from octavo_operator.names import GROUP_SET
from octavo_operator.observed import EngineDeployment, Observed, Pod, Ref, Refusal, RouterReport, ScalingState
from octavo_operator.plan.events import ServiceEvent, action_event
from octavo_operator.plan.operator_upgrade import upgrade_reason
from octavo_operator.plan.plan import Plan, plan, plan_unreadable
from octavo_operator.service import ServiceIdentity, Settings, read_running_parts, read_service
from octavo_operator.spec.service import InvalidSpec
from octavo_operator.timestamps import now_text

logger = logging.getLogger(__name__)

LOAD_EVERY_S = 15.0
Refusals = Mapping[Ref, Refusal]


class NotLeading(Exception):
    """This operator does not hold the Lease any more."""


class Incomplete(Exception):
    """The API server refused a write; the service must be reconciled again."""


class Reconciler:
    def __init__(
        self,
        cluster: Cluster,
        view: View,
        *,
        settings: Callable[[], Settings],
        leadership: Leadership,
        reports: RouterReports,
        queue: WorkQueue[Key],
        secrets_of: Callable[[Key], ServiceSecrets],
        scaling: Callable[[Key], ScalingState | None],
        telemetry: Telemetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._settings = settings
        self._leadership = leadership
        self._reports = reports
        self._queue = queue
        self._secrets_of = secrets_of
        self._scaling = scaling
        self._telemetry = telemetry
        self._clock = clock
        self._load_written_s: dict[Key, float] = {}
        self._beginning: set[Key] = set()  # services whose status does not show yet that the operator upgrades them
        self._events = EventRecorder(cluster, identity=leadership.identity)
        self._writer = Writer(cluster, view)
        self._pod_events = PodSetupEvents(cluster, clock=clock)

    async def work(self) -> None:
        """Reconcile services from the queue until cancelled. Several workers run this concurrently."""
        while True:
            key = await self._queue.get()
            try:
                with self._telemetry.time_reconcile():
                    await self.reconcile(key)
            except (ApiError, OSError, TimeoutError, NotLeading, Incomplete) as error:
                self._telemetry.count_error(error)
                delay_s = self._queue.failed(key)
                logger.warning("%s/%s: %s; next attempt in %.1f s", *key, error or type(error).__name__, delay_s)
            except Exception as error:
                self._telemetry.count_error(error)
                delay_s = self._queue.failed(key)
                logger.exception(
                    "%s/%s: a bug in the operator, please report it; next attempt in %.1f s", *key, delay_s
                )
            except BaseException:
                self._queue.failed(key)
                raise
            else:
                self._queue.done(key)

    async def reconcile(self, key: Key) -> None:
        raw = self._view.services.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"] or not self._leadership.may_write:
            return  # the service is deleted, and Kubernetes deletes its children; or another operator leads
        service, make_plan = self._planner(raw)
        retry_s = await self._pod_events.refresh(self._view.pods(service), self._view.stateful_sets(service))
        planned, refusals = await self._act(service, raw, make_plan)
        await self._conclude(key, raw, planned.status, planned.events)
        self._beginning.discard(key)
        for delay_s in filter(None, (retry_s, planned.again_s)):
            self._queue.add_later(key, delay_s)
        if refusals:
            raise Incomplete("; ".join(f"{kind} {name} {r.message}" for (kind, name), r in refusals.items()))

    def _planner(self, raw: Mapping[str, Any]) -> tuple[ServiceIdentity, Callable[[Refusals], Plan]]:
        """The service, as far as its spec can be read, and the function that makes its plan."""
        try:
            service = read_service(raw)
        except InvalidSpec as error:
            parts, message = read_running_parts(raw), str(error)
            return parts, lambda refusals: plan_unreadable(
                parts, self._observed(parts, refusals), message, now=now_text()
            )
        secrets = self._secrets_of((service.namespace, service.name))
        return service, lambda refusals: plan(
            service, self._observed(service, refusals), self._settings(), now=now_text(), new_secrets=secrets
        )

    async def _act(
        self, service: ServiceIdentity, raw: Mapping[str, Any], make_plan: Callable[[Refusals], Plan]
    ) -> tuple[Plan, dict[Ref, Refusal]]:
        """Execute the plan; return the plan and the refusals. If there are refusals, the plan is made again, so that
        its status shows them."""
        planned, refusals = make_plan({}), dict[Ref, Refusal]()
        if upgrade_reason(planned.status) == "RollingOut":
            self._beginning.add((service.namespace, service.name))
        for action in planned.actions:
            self._check_leading()
            refusal = await self._writer.execute(service, action, now=now_text())
            if refusal is not None:
                refusals[refusal[0]] = refusal[1]
                continue
            self._telemetry.count_action(action)
            if (event := action_event(action)) is not None:
                await self._events.record(raw, event, seen_at=now_text("microseconds"))
        return (make_plan(refusals) if refusals else planned), refusals

    def _observed(self, service: ServiceIdentity, refusals: Refusals) -> Observed:
        pods = self._view.router_pods(self._view.router_of(service))
        reports: dict[str, RouterReport] = self._reports.for_pods(service.namespace, pods)
        scaling = self._scaling((service.namespace, service.name))
        upgrades = self._view.upgrades((service.namespace, service.name), self._beginning)
        seen = replace(self._view.observed(service, reports), refusals=refusals, scaling=scaling, upgrades=upgrades)
        sets = [key for key, since in self._view.stateful_sets(service).items() if since is not None]
        return self._with_setup_failures(seen, pods, sets)

    def _with_setup_failures(self, observed: Observed, routers: Mapping[str, Any], sets: Sequence[Key]) -> Observed:
        """Add to pods and routers the reasons why their containers can't be created, and to LeaderWorkerSets the
        reasons why their pods can't. `sets`: the StatefulSets that lack pods."""
        failures = {name: self._pod_events.trouble_of(f"{namespace}/{name}") for namespace, name in sets}
        deployments = tuple(_with_failure(each, failures) for each in observed.engine_deployments)
        engines = tuple(map(self._with_setup_failure, observed.pods))
        troubles = (self._pod_events.trouble_of(raw["metadata"]["uid"]) for raw in routers.values())
        trouble = observed.router_trouble or next(filter(None, troubles), "")
        missing = missing_secrets([trouble, *(part.message for pod in engines for part in pod.parts)])
        observed = replace(observed, engine_deployments=deployments)
        return replace(observed, pods=engines, router_trouble=trouble, missing_secrets=missing)

    def _with_setup_failure(self, pod: Pod) -> Pod:
        message = "" if pod.trouble is not None else self._pod_events.trouble_of(pod.uid)
        seen = replace(pod, trouble="MountFailed", message=message) if message else pod
        return replace(seen, workers=tuple(map(self._with_setup_failure, pod.workers)))

    async def _conclude(
        self, key: Key, raw: Mapping[str, Any], status: dict[str, Any], events: Iterable[ServiceEvent]
    ) -> None:
        """Write the events, then the status: if the operator dies in between, the same transition is found again."""
        for event in events:
            self._check_leading()
            await self._events.record(raw, event, seen_at=raw["metadata"].get("resourceVersion", ""))
        await self._write_status(key, status)

    async def _write_status(self, key: Key, status: dict[str, Any]) -> None:
        raw = self._view.services.get(key)
        if raw is None or (before := raw.get("status") or {}) == status:
            return
        waited_s = self._clock() - self._load_written_s.get(key, float("-inf"))
        if before | {"load": None} == status | {"load": None} and waited_s < LOAD_EVERY_S:
            self._queue.add_later(key, LOAD_EVERY_S - waited_s)
            return
        self._check_leading()
        self._view.update(await self._cluster.apply_status(*key, status))
        self._load_written_s[key] = self._clock()

    def _check_leading(self) -> None:
        if not self._leadership.may_write:
            raise NotLeading("another operator leads now")


def _with_failure(engine: EngineDeployment, failures: Mapping[str, str]) -> EngineDeployment:
    """Add to a LeaderWorkerSet the first failure of its StatefulSets, whose names begin with its own."""
    mine = (text for name, text in failures.items() if engine.kind == GROUP_SET and name.startswith(engine.name))
    failure = next(filter(None, mine), engine.failure)
    return replace(engine, failure=failure, exceeds_quota=is_quota_exceeded(failure))
