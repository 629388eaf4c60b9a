"""`octavo-operator`: the watches, the Lease and the workers, side by side on one event loop."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress

import aiohttp
import kopf
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration

from octavo_operator.cluster.client import Cluster
from octavo_operator.cluster.lease import Leadership
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reconciler import Reconciler
from octavo_operator.cluster.reports import RouterReports
from octavo_operator.cluster.view import Key, View
from octavo_operator.handlers import Watching
from octavo_operator.secret import derived_secret, operator_key
from octavo_operator.settings_flags import build_parser, settings_of

logger = logging.getLogger("octavo_operator")

RESYNC_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    kopf.configure(log_format=kopf.LogFormat.JSON if args.log_format == "json" else kopf.LogFormat.FULL)
    with suppress(KeyboardInterrupt):
        asyncio.run(_run(args))
    return 0


async def _run(args: argparse.Namespace) -> None:
    settings, view, queue = settings_of(args), View(), WorkQueue[Key]()

    def reported(pod: Key) -> None:
        for service in view.served_by(pod):
            queue.add(service)

    async with ApiClient(await _configuration()) as api, aiohttp.ClientSession() as session:
        cluster, reports = Cluster(api), RouterReports(session, reported)
        key = await _key(cluster, args)

        def secret_of(router: Key) -> str:
            return derived_secret(key, *router)

        leadership = Leadership(cluster, namespace=args.lease_namespace, name=args.lease_name, identity=args.identity)
        reconciler = Reconciler(
            cluster, view, settings=settings, leadership=leadership, reports=reports, queue=queue, secret_of=secret_of
        )
        registry = kopf.OperatorRegistry()
        Watching(view, queue, reports, secret_of).register(registry, settings)
        kopf.on.login(registry=registry)(_log_in)
        kopf.on.startup(registry=registry)(_configure)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(reconciler.work()) for _ in range(args.workers)]
            background += [tasks.create_task(leadership.run()), tasks.create_task(_resync(view, queue, leadership))]
            try:
                await kopf.operator(
                    registry=registry,
                    standalone=True,
                    namespaces=args.namespaces or (),
                    clusterwide=not args.namespaces,
                    liveness_endpoint=args.liveness,
                )
            finally:
                for task in background:
                    task.cancel()
                await reports.close()


async def _key(cluster: Cluster, args: argparse.Namespace) -> bytes:
    if args.key_file is not None:
        content: bytes = args.key_file.read_bytes()
        return content.strip()
    return await operator_key(cluster, namespace=args.lease_namespace, name=args.key_secret)


async def _resync(view: View, queue: WorkQueue[Key], leadership: Leadership) -> None:
    """Everything when this operator begins to lead, and from time to time: what no watch has told comes to light."""
    while True:
        await leadership.gained.wait()
        for key in view.services:
            queue.add(key)
        with suppress(TimeoutError):
            async with asyncio.timeout(RESYNC_S):
                await leadership.lost.wait()


async def _configuration() -> Configuration:
    found = Configuration()
    try:
        config.load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        await config.load_kube_config(client_configuration=found)  # type: ignore[no-untyped-call]
    return found


def _log_in(logger: kopf.Logger, settings: kopf.OperatorSettings, **_: object) -> kopf.ConnectionInfo | None:
    inside = kopf.login_with_service_account(logger=logger, settings=settings)
    return inside or kopf.login_with_kubeconfig(logger=logger, settings=settings)


def _configure(settings: kopf.OperatorSettings, **_: object) -> None:
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.watching.server_timeout = 300


if __name__ == "__main__":
    sys.exit(main())
