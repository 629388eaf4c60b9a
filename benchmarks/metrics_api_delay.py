"""Time from a change of a replica's KV figure until the metrics API returns the new value.

The replica has no engine, but publishes a real KV stream to a real `octavo route`. A real `octavo-operator` follows the
router and serves the API behind a real kube-apiserver (octavo_testing.control_plane names the sources of the programs).
The pods are objects without containers: this script forwards the router's state stream as that of the router's pod.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import support_path  # noqa: F401
from aiohttp import web
from octavo_operator.metrics_api.server import GROUP_VERSION, RESOURCE
from octavo_operator.names import COMPONENT_LABEL, ENGINE, REVISION_LABEL, ROUTER, ROUTER_LABEL, SERVICE_LABEL
from octavo_server.router.observe.state_stream import PERIOD_S
from octavo_testing.control_plane import ControlPlane, control_plane, missing_tools
from octavo_testing.fake_replica import FakeReplica
from octavo_testing.infsvc_cases import Case
from octavo_testing.metrics_api import api_objects
from octavo_testing.operator_command import OperatorProcess
from octavo_testing.route_command import octavo_route
from octavo_testing.serve_command import free_port
from table import number, print_table, save_json
from tqdm import tqdm

SYSTEM, NAMESPACE, SERVICE, API = "octavo-system", "default", "llm", "octavo-metrics-api"
PATH = f"/apis/{GROUP_VERSION}/namespaces/{NAMESPACE}/{RESOURCE}/{SERVICE}/kv_used_replicas"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
BLOCKS = 1000  # of the replica, so that each has its own value in thousandths
READY_S, VALUE_S = 30.0, 10.0
POLL_S = 0.01
GOAL_S = 2.0


@asynccontextmanager
async def forward_state(router: str, replica: FakeReplica, port: int) -> AsyncIterator[None]:
    """Serve the state stream of a router with the name of the engine's pod in place of the replica's address."""
    name = replica.url.removeprefix("http://").encode()

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async with aiohttp.ClientSession() as session, session.get(router + "/state/events") as stream:
            stream.raise_for_status()
            async for line in stream.content:
                await response.write(line.replace(b'"name":"' + name, b'"name":"' + f"{SERVICE}-{ENGINE}".encode()))
        return response

    app = web.Application()
    app.add_routes([web.get("/state/events", events)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


def use_blocks(replica: FakeReplica, used: int) -> None:
    replica.step(running=1, total_blocks=BLOCKS, in_use_blocks=used, free_blocks=BLOCKS - used)


def register(plane: ControlPlane, port: int) -> None:
    """Register the metrics API of an operator on this port of the loopback."""
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
    for path, made in api_objects(SYSTEM, port, name=API):
        plane.call("POST", path, made)


def create_service(plane: ControlPlane, router_port: int) -> None:
    """Create a service with a router pod and an engine pod that run."""
    plane.call("POST", f"/apis/{RESOURCE.partition('.')[2]}/v1alpha1/namespaces/{NAMESPACE}/inferenceservices",
               Case("", {"replicas": 1}, name=SERVICE).manifest())  # fmt: skip
    rows = [{"type": type_, "status": "True"} for type_ in ("PodScheduled", "ContainersReady", "Ready")]
    for component in (ROUTER, ENGINE):
        labels = {SERVICE_LABEL: SERVICE, ROUTER_LABEL: SERVICE, REVISION_LABEL: "1", COMPONENT_LABEL: component}
        ports = [{"name": "admin", "containerPort": router_port}]
        pod = {
            "metadata": {"name": f"{SERVICE}-{component}", "labels": labels},
            "spec": {"containers": [{"name": component, "image": "octavo.invalid/image", "ports": ports}]},
        }
        status = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}], "conditions": rows}
        plane.call("POST", PODS, pod)
        kind = "application/strategic-merge-patch+json"
        plane.call("PATCH", f"{PODS}/{SERVICE}-{component}/status", {"status": status}, kind=kind)


async def wait_for_value(session: aiohttp.ClientSession, plane: ControlPlane, used: int, *, within_s: float) -> float:
    """Read the metric until it has the value of so many used blocks; return the monotonic time of the answer."""
    deadline, found = time.monotonic() + within_s, ""
    while time.monotonic() < deadline:
        async with session.get(plane.url + PATH, headers=plane.headers()) as answer:
            found = await answer.text()
        if answer.ok and json.loads(found)["items"][0]["value"] == f"{used * 1000 // BLOCKS}m":
            return time.monotonic()
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"no value of {used} blocks within {within_s:g} s: {found}")


async def measure(plane: ControlPlane, folder: Path, times: int) -> list[float]:
    """Seconds of each change."""
    api_port, state_port, replica = free_port(), free_port(), FakeReplica()
    await replica.start()
    use_blocks(replica, 0)
    register(plane, api_port)
    create_service(plane, state_port)
    flags: dict[str, Any] = {"metrics_api_port": api_port, "metrics_api_service": API, "lease_namespace": SYSTEM}
    operator = OperatorProcess(folder, plane.kubeconfig(), identity="a", **flags)
    operator.start()
    connector = aiohttp.TCPConnector(ssl=plane.ssl_context)
    try:
        with octavo_route(folder, "--replica", replica.url) as router:
            async with (
                forward_state(router.url, replica, state_port),
                aiohttp.ClientSession(connector=connector) as session,
            ):
                await wait_for_value(session, plane, 0, within_s=READY_S)
                return [
                    await change_once(session, plane, replica, 1 + i % BLOCKS)
                    for i in tqdm(range(times), unit="change")
                ]
    finally:
        operator.kill()
        await replica.stop()


async def change_once(session: aiohttp.ClientSession, plane: ControlPlane, replica: FakeReplica, used: int) -> float:
    """Seconds until the API has the value. Changes begin at random times of the router's period."""
    await asyncio.sleep(random.random() * PERIOD_S)
    began_s = time.monotonic()
    use_blocks(replica, used)
    return await wait_for_value(session, plane, used, within_s=VALUE_S) - began_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=300, help="number of changes. Default: 300")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if missing := missing_tools():
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory() as folder, control_plane(Path(folder)) as plane:
        delays = asyncio.run(measure(plane, Path(folder), arguments.times))
    percentiles = statistics.quantiles(delays, n=100, method="inclusive")
    figures = {"median, s": statistics.median(delays), "p99, s": percentiles[-1], "max, s": max(delays)}
    print_table("metrics API", ("figure", "value"), [(name, number(value)) for name, value in figures.items()])
    save_json(arguments.json, {"figures": figures, "delays": delays})
    return 0 if figures["p99, s"] <= GOAL_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
