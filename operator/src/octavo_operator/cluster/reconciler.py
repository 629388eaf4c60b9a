"""`Reconciler`: takes a service from the queue, plans, carries the plan out, writes what changed of the status.

Whatever fails fails for one service, which comes back later; a plan is made anew each time. Each write first asks
whether this operator still leads.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from octavo_operator.cluster.client import ApiError, Cluster
from octavo_operator.cluster.lease import Leadership
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.observed import RouterReport
from octavo_operator.plan.actions import Action, Apply, CreateOnce, Delete, SetGate
from octavo_operator.plan.assess import refused
from octavo_operator.plan.conditions import written
from octavo_operator.plan.plan import Plan, plan
from octavo_operator.service import Service, Settings, read_service
from octavo_operator.spec.service import InvalidSpec

logger = logging.getLogger(__name__)


class NotLeading(Exception):
    """Another operator acts now."""


class Reconciler:
    def __init__(
        self,
        cluster: Cluster,
        view: View,
        *,
        settings: Settings,
        leadership: Leadership,
        reports: RouterReports,
        queue: WorkQueue[Key],
        secret_of: Callable[[Key], str],
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._settings = settings
        self._leadership = leadership
        self._reports = reports
        self._queue = queue
        self._secret_of = secret_of

    async def work(self) -> None:
        """One of several workers; until it is cancelled."""
        while True:
            key = await self._queue.take()
            try:
                await self._reconcile(key)
            except (ApiError, OSError, TimeoutError, NotLeading) as error:
                delay_s = self._queue.failed(key)
                logger.warning("%s/%s: %s; once more in %.1f s", *key, error or type(error).__name__, delay_s)
            except BaseException:
                self._queue.failed(key)
                raise
            else:
                self._queue.done(key)

    async def _reconcile(self, key: Key) -> None:
        raw = self._view.services.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"] or not self._leadership.may_write:
            return  # its children go with it; or it isn't ours to act
        try:
            service = read_service(raw)
        except InvalidSpec as error:
            await self._write_status(key, _refusal(raw, str(error)))
            return
        planned = self._plan(service)
        for action in planned.actions:
            logger.info("%s/%s: %s", *key, described(action))
            await self._carry_out(service.namespace, action)
        await self._write_status(key, planned.status)

    def _plan(self, service: Service) -> Plan:
        pods = self._view.router_pods((service.namespace, service.router))
        reports: dict[str, RouterReport] = self._reports.of(service.namespace, pods)
        observed = self._view.observed(service, reports)
        return plan(
            service, observed, self._settings, now=_now(), new_secret=self._secret_of((service.namespace, service.name))
        )

    async def _carry_out(self, namespace: str, action: Action) -> None:
        self._check_leading()
        match action:
            case Apply(manifest):
                self._see(await self._cluster.apply(manifest), manifest["kind"])
            case CreateOnce(manifest):
                await self._cluster.create(manifest)
            case Delete(kind, name, uid):
                await self._cluster.delete(kind, namespace, name, uid)
            case SetGate(pod, uid, epoch, reason):
                await self._cluster.set_gate(namespace, pod, uid, epoch=epoch, reason=reason, now=_now())

    def _see(self, answer: dict[str, Any], kind: str) -> None:
        """What was just written is known at once: the watch, which comes later, must not make us write it again."""
        self._view.see({**answer, "kind": kind})

    async def _write_status(self, key: Key, status: dict[str, Any]) -> None:
        raw = self._view.services.get(key)
        if raw is None or (raw.get("status") or {}) == status:
            return
        self._check_leading()
        answer = await self._cluster.apply_status(*key, status)
        self._view.see(answer)

    def _check_leading(self) -> None:
        if not self._leadership.may_write:
            raise NotLeading("another operator leads now")


def described(action: Action) -> str:
    match action:
        case Apply(manifest, reason):
            return f"applies {manifest['kind']} {manifest['metadata']['name']}: {reason}"
        case CreateOnce(manifest, reason):
            return f"creates {manifest['kind']} {manifest['metadata']['name']}: {reason}"
        case Delete(kind, name, _, reason):
            return f"deletes {kind} {name}: {reason}"
        case SetGate(pod, _, epoch, reason):
            return f"{'admits' if epoch else 'withdraws'} pod {pod}: {reason}"


def _refusal(raw: Any, message: str) -> dict[str, Any]:
    status = raw.get("status") or {}
    generation = raw["metadata"]["generation"]
    rows = written(refused(message), status.get("conditions", ()), generation=generation, now=_now())
    return {**status, "observedGeneration": generation, "conditions": rows}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
