"""`octavo-operator`: watches, census, Lease and workers on one event loop; how they start, and how they end."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import aiohttp
import kopf
from kubernetes.aio.client import ApiClient

from octavo_operator.cluster.census import Census, is_served
from octavo_operator.cluster.client import KINDS, ApiError, Cluster
from octavo_operator.cluster.credentials import client_of, found_configuration, kopf_login
from octavo_operator.cluster.lease import Leadership
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reconciler import Reconciler
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.handlers import SERVICES, Watching, watched
from octavo_operator.metrics import Telemetry
from octavo_operator.probes import Pulse, answering
from octavo_operator.rounds import Rounds, patiently
from octavo_operator.secret import derived_secret, keep_key, operator_key
from octavo_operator.service import Settings
from octavo_operator.settings_flags import build_parser, settings_of
from octavo_operator.spec.service import GROUP, KIND
from octavo_operator.watches import Watches, quieten_kopf

logger = logging.getLogger("octavo_operator")

LAST_WRITES_S = 5.0
LEASE_PULSE_S, CENSUS_PULSE_S = 60.0, 900.0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    kopf.configure(log_format=kopf.LogFormat.JSON if args.log_format == "json" else kopf.LogFormat.FULL)
    quieten_kopf()
    asyncio.run(_run(args))
    return 0


async def _run(args: argparse.Namespace) -> None:
    """Until it is told to end."""
    told, pulse, telemetry = asyncio.Event(), Pulse(), Telemetry()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with (
        client_of(await found_configuration()) as api,
        aiohttp.ClientSession() as session,
        answering(args.liveness, pulse, telemetry),
    ):
        operating = _operate(args, api, session, pulse=pulse, telemetry=telemetry, told=told)
        tasks = [asyncio.create_task(operating), asyncio.create_task(told.wait())]
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
    pulse: Pulse,
    telemetry: Telemetry,
    told: asyncio.Event,
) -> None:
    cluster, view, queue = Cluster(api), View(), WorkQueue[Key]()
    namespaces = tuple(args.namespaces or ())
    settings = await patiently(lambda: _possible(cluster, settings_of(args), namespaces))
    key = await patiently(lambda: _key(cluster, args))

    def secret_of(router: Key) -> str:
        return derived_secret(key, *router)

    def reported(pod: Key) -> None:
        for service in view.served_by(pod):
            queue.add(service)

    reports, registry = RouterReports(session, reported), kopf.OperatorRegistry()
    watches = Watches(
        registry, labelled=watched(settings), namespaces=namespaces, on_signal=told.set, on_end=lambda: rounds.doubt()
    )
    watching = Watching(view, queue, reports, secret_of=secret_of, on_listing=lambda: rounds.doubt())
    watching.register(registry, settings)
    kopf.on.login(registry=registry)(kopf_login(api.configuration))
    kinds = [kind for kind, resource in KINDS.items() if resource in (SERVICES, *watched(settings))]
    census = Census(cluster, view, kinds=kinds, namespaces=namespaces, forget=watching.forget)
    lease = {"namespace": args.lease_namespace, "name": args.lease_name, "identity": args.identity}
    leadership = Leadership(cluster, **lease, on_doubt=lambda: rounds.doubt())
    telemetry.look(queue_depth=queue.__len__, leads=lambda: leadership.may_write, services=view.services.values)
    reconciler = Reconciler(
        cluster,
        view,
        settings=settings,
        leadership=leadership,
        reports=reports,
        queue=queue,
        secret_of=secret_of,
        telemetry=telemetry,
    )
    keep = partial(_keep, cluster, args, key)
    rounds = Rounds(census, view, queue, leadership=leadership, watches=watches, on_turn=keep)
    pulse.expect("nobody has looked at the Lease", lambda: leadership.looked_s, within_s=LEASE_PULSE_S)
    pulse.expect("nothing was held against the cluster", lambda: rounds.counted_s, within_s=CENSUS_PULSE_S)
    try:
        async with asyncio.TaskGroup() as tasks:
            for duty in (watches.run(), rounds.count(), rounds.look_anew()):
                tasks.create_task(duty)
            await rounds.has_seen_all.wait()
            pulse.is_ready = True
            for _ in range(args.workers):
                tasks.create_task(reconciler.work())
            await _lead(leadership, queue, pulse)
    finally:
        await reports.close()


async def _lead(leadership: Leadership, queue: WorkQueue[Key], pulse: Pulse) -> None:
    """Until it is cancelled. Then no new writes; once those on their way have ended, the Lease is free for another."""
    leading = asyncio.create_task(leadership.run())
    try:
        await asyncio.wait((leading,))
        leading.result()
    finally:
        pulse.is_ready = False
        leadership.retire()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITES_S):
                await queue.idle()
        leading.cancel()
        await asyncio.wait((leading,))


async def _possible(cluster: Cluster, settings: Settings, namespaces: Sequence[str]) -> Settings:
    """As this cluster allows: without what it has no kinds for. Without our own there is nothing to do."""
    where = namespaces[0] if namespaces else None
    if not await is_served(cluster, KIND, where):
        name = f"{SERVICES[1]}.{GROUP}"
        raise ApiError(404, "NotServed", f"the CRD {name} is not installed: install the chart (docs/guide/install.md)")
    if settings.has_pod_monitors and not await is_served(cluster, "PodMonitor", where):
        logger.warning("there are no PodMonitors in this cluster: none are made until the operator is started anew")
        settings = replace(settings, has_pod_monitors=False)
    if settings.has_gateway_api and not await is_served(cluster, "HTTPRoute", where):
        logger.warning("there are no HTTPRoutes in this cluster: none are made until the operator is started anew")
        settings = replace(settings, has_gateway_api=False)
    return settings


async def _key(cluster: Cluster, args: argparse.Namespace) -> bytes:
    if args.key_file is not None:
        content: bytes = args.key_file.read_bytes()
        return content.strip()
    return await operator_key(cluster, namespace=args.lease_namespace, name=args.key_secret)


async def _keep(cluster: Cluster, args: argparse.Namespace, key: bytes) -> None:
    if args.key_file is None:
        await keep_key(cluster, key, namespace=args.lease_namespace, name=args.key_secret)


if __name__ == "__main__":
    sys.exit(main())
