"""Entry point of `octavo-operator`: runs watches, resync, leader election and workers on one event loop."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client import ApiClient

from octavo_operator.cli import build_parser, settings_of
from octavo_operator.cluster.autoscaler import Autoscaler, ServiceLoads
from octavo_operator.cluster.client import KINDS, ApiError, Cluster
from octavo_operator.cluster.credentials import kopf_login, load_configuration, make_client
from octavo_operator.cluster.inventory import Inventory, is_served
from octavo_operator.cluster.lease import Leadership
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reconciler import Reconciler
from octavo_operator.cluster.reports import RouterReports, router_session
from octavo_operator.cluster.view import Key, View
from octavo_operator.handlers import SERVICES, EventHandlers, watched_resources
from octavo_operator.health import Liveness, serve_health
from octavo_operator.kopf_runner import KopfRunner, reduce_kopf_logging
from octavo_operator.metrics import Telemetry
from octavo_operator.metrics_api.registration import MetricsApi
from octavo_operator.metrics_api.server import LoadOf, MetricsServer
from octavo_operator.optional_apis import OptionalApis
from octavo_operator.resync import Resync, retry_until_ok
from octavo_operator.secret import derive_secrets, operator_key, restore_key
from octavo_operator.service import Settings
from octavo_operator.spec.service import GROUP, KIND

logger = logging.getLogger("octavo_operator")

LAST_WRITES_S = 5.0
LEASE_MAX_AGE_S, COMPARISON_MAX_AGE_S = 60.0, 900.0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    kopf.configure(log_format=kopf.LogFormat.JSON if args.log_format == "json" else kopf.LogFormat.FULL)
    reduce_kopf_logging()
    asyncio.run(_run(args))
    return 0


async def _run(args: argparse.Namespace) -> None:
    """Run until SIGINT or SIGTERM arrives."""
    stopping, liveness, telemetry = asyncio.Event(), Liveness(), Telemetry()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with (
        make_client(await load_configuration()) as api,
        router_session() as session,
        serve_health(args.liveness, liveness, telemetry),
    ):
        operating = _operate(args, api, session, liveness=liveness, telemetry=telemetry, stopping=stopping)
        tasks = [asyncio.create_task(operating), asyncio.create_task(stopping.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()


async def _operate(
    args: argparse.Namespace,
    api: ApiClient,
    session: aiohttp.ClientSession,
    *,
    liveness: Liveness,
    telemetry: Telemetry,
    stopping: asyncio.Event,
) -> None:
    cluster, view, queue, namespaces = Cluster(api), View(), WorkQueue[Key](), tuple(args.namespaces)
    apis = await retry_until_ok(lambda: _find_apis(cluster, settings_of(args), namespaces))
    key = await retry_until_ok(lambda: _load_key(cluster, args))
    secrets_of = partial(derive_secrets, key)

    def settings() -> Settings:
        return apis.settings

    def reported(pod: Key) -> None:
        for service in view.services_behind_router_of(pod):
            queue.add(service)
            autoscaler.look(service)

    reports = RouterReports(session, reported, engines_of=view.engines_behind_router_of)
    runner = KopfRunner(
        registry := kopf.OperatorRegistry(),
        labelled=watched_resources(apis.wanted),
        namespaces=namespaces,
        on_signal=stopping.set,
        on_end=lambda: resync.mark_stale(),
    )
    handlers = EventHandlers(view, queue, reports, secrets_of=secrets_of, on_watch_start=lambda: resync.mark_stale())
    handlers.register(registry, apis.wanted)
    kopf.on.login(registry=registry)(kopf_login(api.configuration))
    inventory = _inventory(cluster, view, apis, handlers, namespaces)
    leadership = Leadership(cluster, **_lease(args), on_gap=lambda: resync.mark_stale())
    loads = ServiceLoads(view, reports)
    autoscaler = Autoscaler(cluster, view, loads, settings=settings, leadership=leadership, queue=queue)
    reconciler = Reconciler(
        cluster,
        view,
        settings=settings,
        leadership=leadership,
        reports=reports,
        queue=queue,
        secrets_of=secrets_of,
        scaling=autoscaler.state_of,
        telemetry=telemetry,
    )
    restore = partial(_restore_key, cluster, args, key)
    resync = Resync(inventory, view, queue, leadership=leadership, watches=runner, on_requeue=restore)
    _observe(telemetry, liveness, view, queue, leadership, autoscaler, resync)
    requeue = partial(_add_all, queue, view)
    served = [await _metrics_api(args, cluster, apis, loads.of, leadership, requeue)] if args.metrics_api_port else ()
    duties = (runner.run(), resync.compare_until_cancelled(), resync.requeue_until_cancelled())
    async with aclosing(reports), asyncio.TaskGroup() as tasks:
        _start(tasks, *duties, *(api.run() for api in served), apis.ask_until_cancelled(resync.add_kind))
        await resync.is_synced.wait()
        liveness.is_ready = True
        _start(tasks, autoscaler.run(), *(reconciler.work() for _ in range(args.workers)))
        await _lead(leadership, queue, liveness)


def _inventory(
    cluster: Cluster, view: View, apis: OptionalApis, handlers: EventHandlers, namespaces: Sequence[str]
) -> Inventory:
    return Inventory(
        cluster,
        view,
        kinds=_kinds(apis),
        namespaces=namespaces,
        remove=handlers.remove,
        mark_missing=apis.mark_missing,
    )


def _observe(
    telemetry: Telemetry,
    liveness: Liveness,
    view: View,
    queue: WorkQueue[Key],
    leadership: Leadership,
    autoscaler: Autoscaler,
    resync: Resync,
) -> None:
    """Connect the metrics and the liveness probe with the parts that they observe."""
    telemetry.set_sources(
        queue_depth=queue.__len__,
        leads=lambda: leadership.may_write,
        services=view.services.values,
        autoscaling=autoscaler.rows,
    )
    liveness.expect("the Lease was not checked", lambda: leadership.checked_s, within_s=LEASE_MAX_AGE_S)
    liveness.expect("the view was not compared", lambda: resync.compared_s, within_s=COMPARISON_MAX_AGE_S)


async def _metrics_api(
    args: argparse.Namespace,
    cluster: Cluster,
    apis: OptionalApis,
    load_of: LoadOf,
    leadership: Leadership,
    on_change: Callable[[], None],
) -> MetricsApi:
    made = MetricsApi(
        cluster,
        MetricsServer(load_of),
        service=(args.lease_namespace, args.metrics_api_service),
        port=args.metrics_api_port,
        leads=lambda: leadership.may_write,
        on_change=on_change,
    )
    apis.serves_metrics = lambda: made.is_ours
    await retry_until_ok(made.find_owner)  # before the first plan, which deletes HPAs if the API is not ours
    return made


def _add_all(queue: WorkQueue[Key], view: View) -> None:
    for key in view.services:
        queue.add(key)


def _lease(args: argparse.Namespace) -> dict[str, Any]:
    return {"namespace": args.lease_namespace, "name": args.lease_name, "identity": args.identity}


def _kinds(apis: OptionalApis) -> list[str]:
    """The kinds that the cluster serves now, of those that are watched."""
    served = replace(apis.settings, has_metrics_api=apis.wanted.has_metrics_api)
    return [kind for kind, resource in KINDS.items() if resource in (SERVICES, *watched_resources(served))]


def _start(tasks: asyncio.TaskGroup, *duties: Coroutine[Any, Any, None]) -> None:
    for duty in duties:
        tasks.create_task(duty)


async def _lead(leadership: Leadership, queue: WorkQueue[Key], liveness: Liveness) -> None:
    """Take part in the leader election until cancelled; then stop new writes, wait for those in progress, and release
    the Lease."""
    leading = asyncio.create_task(leadership.run())
    try:
        await asyncio.wait((leading,))
        leading.result()
    finally:
        liveness.is_ready = False
        leadership.retire()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITES_S):
                await queue.wait_idle()
        leading.cancel()
        await asyncio.wait((leading,))


async def _find_apis(cluster: Cluster, wanted: Settings, namespaces: Sequence[str]) -> OptionalApis:
    """Find out which kinds the cluster serves. Raises ApiError if the CRD of InferenceServices is missing."""
    where = namespaces[0] if namespaces else None
    if not await is_served(cluster, KIND, where):
        name = f"{SERVICES[1]}.{GROUP}"
        raise ApiError(
            404, "NotServed", f"the CRD {name} is not installed: install it with the chart (docs/guide/install.md)"
        )
    apis = OptionalApis(cluster, wanted, namespaces)
    await apis.ask()
    return apis


async def _load_key(cluster: Cluster, args: argparse.Namespace) -> bytes:
    if args.key_file is not None:
        content: bytes = args.key_file.read_bytes()
        return content.strip()
    return await operator_key(cluster, namespace=args.lease_namespace, name=args.key_secret)


async def _restore_key(cluster: Cluster, args: argparse.Namespace, key: bytes) -> None:
    if args.key_file is None:
        await restore_key(cluster, key, namespace=args.lease_namespace, name=args.key_secret)


if __name__ == "__main__":
    sys.exit(main())
