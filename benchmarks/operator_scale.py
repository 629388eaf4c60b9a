"""The operator with hundreds of services: time to settle all of them, edits, idle load, restart and failover.

A real `octavo-operator` works against a real kube-apiserver and etcd without nodes (octavo_testing.control_plane names
the sources of the programs). Times come from the API server's audit log. Other load on the machine lengthens them, so
the table also shows the operator's CPU seconds.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import support_path  # noqa: F401
from octavo_operator.spec.autoscaling import Provider
from octavo_testing.audit_log import Call
from octavo_testing.control_plane import GARBAGE, ControlPlane, control_plane, missing_tools
from octavo_testing.infsvc_cases import Case
from octavo_testing.metrics_api import api_objects
from octavo_testing.operator_command import OperatorProcess
from octavo_testing.serve_command import free_port
from table import number, print_table, save_json
from tqdm import tqdm

NAMESPACE = "default"
SERVICES = f"/apis/serving.octavo.dev/v1alpha1/namespaces/{NAMESPACE}/inferenceservices"
METRICS_API, FIRST = "octavo-metrics-api", "a"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
AT_ONCE = 32  # concurrent requests that apply the services
LIMIT_S = 600.0
QUIET_S = 3.0
RESTING = 0.1  # cores that an operator without work uses at most
GOALS = {
    "settled, s": 90.0,
    "edit p95, s": 1.0,
    "RSS, MB": 200.0,
    "RSS of the standby, MB": 200.0,
    "idle calls per s": 1.0,
    "failover, s": 20.0,
}


@dataclass(frozen=True, slots=True)
class Bench:
    plane: ControlPlane
    user: str
    folder: Path
    provider: Provider | None = None  # of the services' autoscaling

    def operator(self, identity: str) -> OperatorProcess:
        """An operator; the first one serves the registered metrics API if HPAs are asked for."""
        flags: dict[str, object] = {"identity": identity, "lease_namespace": NAMESPACE}
        if self.provider == "HPA":
            port = free_port()
            flags |= {"metrics_api_port": port, "metrics_api_service": METRICS_API}
            if identity == FIRST:
                for path, made in api_objects(NAMESPACE, port, name=METRICS_API):
                    self.plane.call("POST", path, made)
        return OperatorProcess(self.folder, self.plane.kubeconfig(self.user), **flags)

    def spec(self) -> dict[str, object]:
        return {} if self.provider is None else {"autoscaling": {"maxReplicas": 4, "provider": self.provider}}

    def calls(self, since: int) -> list[Call]:
        """Return the operators' calls, without those for the Lease."""
        return [c for c in self.plane.audit.calls(since=since, user=self.user) if c.resource != "leases"]

    def writes(self, since: int) -> list[Call]:
        return [call for call in self.calls(since) if call.is_write]

    def wait(self, holds: Callable[[], object], *, every_s: float = 0.1) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s"
            time.sleep(every_s)

    def wait_until_quiet(self, since: int) -> list[Call]:
        """Wait until there was no write for `QUIET_S`, and return the writes."""

        began_s = time.time()

        def is_quiet() -> bool:
            last = max((call.answered_s for call in self.writes(since)), default=began_s)
            return time.time() - last > QUIET_S

        self.wait(is_quiet, every_s=0.5)
        return self.writes(since)

    def holder(self) -> str:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        leases = self.plane.call("GET", path)["items"]
        return next((lease["spec"].get("holderIdentity") or "" for lease in leases), "")


async def apply_all(bench: Bench, names: list[str]) -> None:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=AT_ONCE, ssl=bench.plane.ssl_context)
    ) as session:

        async def apply(name: str) -> None:
            body = json.dumps(Case("", bench.spec(), name=name).manifest())
            async with session.post(bench.plane.url + SERVICES, data=body, headers=bench.plane.headers()) as answer:
                answer.raise_for_status()

        await asyncio.gather(*map(apply, names))


def statuses(bench: Bench) -> Iterator[bool]:
    """Yield for each service whether its status is of its present generation."""
    for found in bench.plane.call("GET", SERVICES)["items"]:
        yield found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]


def measure_settling(bench: Bench, operator: OperatorProcess, count: int) -> dict[str, float]:
    since, cpu_s = bench.plane.audit.mark(), cpu_of(operator)
    started_s = time.time()
    asyncio.run(apply_all(bench, [f"svc-{i:04}" for i in range(count)]))
    applied_s = time.time()
    with tqdm(total=count, desc="settling", unit="service") as bar:

        def is_settled() -> bool:
            bar.update(sum(statuses(bench)) - bar.n)
            return bar.n == count

        bench.wait(is_settled, every_s=1.0)
    writes = bench.wait_until_quiet(since)
    children = bench.plane.call("GET", f"{DEPLOYMENTS}?labelSelector=serving.octavo.dev/service")["items"]
    assert len(children) == 2 * count, f"{len(children)} Deployments"
    failed = [call for call in writes if call.code >= 400]
    return {
        "services": count,
        "applied, s": applied_s - started_s,
        "settled, s": max(call.answered_s for call in writes) - started_s,
        "writes": len(writes),
        "writes refused": len(failed),
        "writes per service": len(writes) / count,
        "write p95, ms": 1000 * p95([call.answered_s - call.asked_s for call in writes]),
        "operator's CPU, s": cpu_of(operator) - cpu_s,
    }


def measure_edits(bench: Bench, operator: OperatorProcess, services: int, times: int) -> dict[str, float]:
    """Change the replicas of one service at a time and measure the time until its Deployment is written."""
    delays, cpu_s = [], cpu_of(operator)
    for i in tqdm(range(times), desc="editing", unit="edit"):
        name, since = f"svc-{i * services // times:04}", bench.plane.audit.mark()
        body = {"spec": {"replicas": 2}}
        bench.plane.call("PATCH", f"{SERVICES}/{name}", body, kind="application/merge-patch+json")

        def written(since: int = since, name: str = name) -> list[Call]:
            return [c for c in bench.writes(since) if c.resource == "deployments" and c.name.startswith(name)]

        bench.wait(written, every_s=0.02)
        asked = next(c for c in bench.plane.audit.calls(since=since) if c.verb == "patch" and c.name == name)
        delays.append(written()[0].answered_s - asked.asked_s)
    return {
        "edits": times,
        "edit median, s": statistics.median(delays),
        "edit p95, s": p95(delays),
        "edit worst, s": max(delays),
        "operator's CPU per edit, s": (cpu_of(operator) - cpu_s) / times,
    }


def measure_idle(bench: Bench, operator: OperatorProcess, seconds: float) -> dict[str, float]:
    bench.wait_until_quiet(bench.plane.audit.mark())
    since, cpu_s = bench.plane.audit.mark(), cpu_of(operator)
    for _ in tqdm(range(round(seconds)), desc="idling", unit="s"):
        time.sleep(1.0)
    calls = bench.calls(since)
    return {
        "idle calls per s": len(calls) / seconds,
        "idle writes": sum(call.is_write for call in calls),
        "idle CPU, %": 100 * (cpu_of(operator) - cpu_s) / seconds,
        "RSS, MB": operator.process.memory_info().rss / 1e6,
    }


def measure_restart(bench: Bench, operator: OperatorProcess) -> dict[str, float]:
    """Restart the operator, which must reconcile every service without a write."""
    operator.stop()
    since = bench.plane.audit.mark()
    operator.start()
    bench.wait(lambda: bench.holder() == FIRST, every_s=0.2)
    wait_until_rested(operator)
    cpu_s = cpu_of(operator)
    return {"writes after a restart": len(bench.writes(since)), "restart CPU, s": cpu_s}


def measure_failover(bench: Bench, leader: OperatorProcess) -> dict[str, float]:
    """Kill the leader, edit a service at once, and measure the time until the standby writes the edit."""
    other = bench.operator("b")
    other.start()
    try:
        wait_until_rested(other)
        since = bench.plane.audit.mark()
        leader.kill()
        killed_s = time.time()
        body = {"spec": {"replicas": 3}}
        bench.plane.call("PATCH", f"{SERVICES}/svc-0000", body, kind="application/merge-patch+json")
        bench.wait(lambda: [c for c in bench.writes(since) if c.resource == "deployments"])
        first = next(c for c in bench.writes(since) if c.resource == "deployments")
        return {"failover, s": first.answered_s - killed_s, "RSS of the standby, MB": rss_mb(other)}
    finally:
        other.kill()


def wait_until_rested(operator: OperatorProcess) -> None:
    """Wait until the operator has processed all objects and uses next to no CPU time."""
    before_s = float("-inf")
    while cpu_of(operator) - before_s > RESTING * QUIET_S or cpu_of(operator) < 1.0:
        before_s = cpu_of(operator)
        time.sleep(QUIET_S)


def cpu_of(operator: OperatorProcess) -> float:
    times = operator.process.cpu_times()
    return times.user + times.system


def rss_mb(operator: OperatorProcess) -> float:
    return operator.process.memory_info().rss / 1e6


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    with control_plane(folder, audit=True, controllers=(GARBAGE, *arguments.controllers)) as plane:
        bench = Bench(plane, plane.create_account(NAMESPACE, "octavo-operator"), folder, arguments.autoscaling)
        operator = bench.operator(FIRST)
        operator.start()
        try:
            bench.wait(lambda: bench.holder() == FIRST)
            figures = measure_settling(bench, operator, arguments.services)
            figures |= measure_edits(bench, operator, arguments.services, arguments.edits)
            figures |= measure_idle(bench, operator, arguments.idle)
            figures |= measure_restart(bench, operator)
            figures |= measure_failover(bench, operator)
        finally:
            operator.kill()
            if arguments.log is not None:
                arguments.log.write_bytes(operator.log.read_bytes())
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=500, help="number of services. Default: 500")
    parser.add_argument("--edits", type=int, default=50, help="number of edits. Default: 50")
    parser.add_argument("--idle", type=float, default=60.0, metavar="S", help="seconds of idle load. Default: 60")
    parser.add_argument("--controllers", nargs="*", default=(), help="controllers of kube-controller-manager to run")
    parser.add_argument(
        "--autoscaling", choices=["HPA", "Operator"], help="provider of autoscaling for every service. Default: none"
    )
    parser.add_argument("--log", type=Path, help="file for the operator's log")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if missing := missing_tools():
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, Path(folder))
    print_table(
        "operator",
        ("figure", "value", "goal"),
        [(name, number(value), f"<= {GOALS[name]:g}" if name in GOALS else "") for name, value in figures.items()],
    )
    save_json(arguments.json, {"figures": figures, "goals": GOALS})
    met = all(figures[name] <= goal for name, goal in GOALS.items()) and not figures["writes after a restart"]
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
