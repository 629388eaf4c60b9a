"""`SimulatedKubelet`: marks the pods of one service as running, and serves the state stream of its router.

Real controllers create the pods, and a real operator follows the stream and admits them. All router pods have a
loopback address of this kubelet as their IP, with the admin port that the operator expects.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import randbelow
from threading import Event, Thread
from typing import Any

from octavo_operator.cluster.client import path_of
from octavo_operator.names import ADMITTED_GATE, COMPONENT_LABEL, ENGINE, ROUTER_ADMIN_PORT, SERVICE_LABEL

from octavo_testing.control_plane import ControlPlane

STRATEGIC = "application/strategic-merge-patch+json"
PERIOD_S = 0.1
Raw = dict[str, Any]


class SimulatedKubelet:
    def __init__(self, plane: ControlPlane, namespace: str, service: str) -> None:
        self._plane = plane
        self._pods = path_of("Pod", namespace)
        self._query = f"?labelSelector={SERVICE_LABEL}={service}"
        self._stopping = Event()
        self._replicas: list[Raw] = []  # of the router's state
        self.address = f"127.{1 + randbelow(250)}.{randbelow(250)}.{1 + randbelow(250)}"

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadingHTTPServer((self.address, ROUTER_ADMIN_PORT), self._handler()) as server:
            threads = [Thread(target=server.serve_forever), Thread(target=self._run)]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._stopping.set()
                server.shutdown()
                for thread in threads:
                    thread.join()

    def pods(self, component: str = ENGINE) -> list[Raw]:
        found = self._plane.call("GET", self._pods + self._query)["items"]
        return [pod for pod in found if pod["metadata"]["labels"][COMPONENT_LABEL] == component]

    def num_ready(self) -> int:
        """Number of engine pods that are ready, which needs the operator's admission."""
        return sum(_conditions(pod).get("Ready") == "True" for pod in self.pods())

    def delete(self, pod: Raw) -> None:
        self._plane.call("DELETE", f"{self._pods}/{pod['metadata']['name']}")

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            with suppress(OSError):  # a pod was deleted meanwhile
                self._settle()

    def _settle(self) -> None:
        found = self._plane.call("GET", self._pods + self._query)["items"]
        for pod in found:
            conditions = _conditions(pod)
            is_engine = pod["metadata"]["labels"][COMPONENT_LABEL] == ENGINE
            wanted = {"PodScheduled": "True", "ContainersReady": "True"}
            wanted["Ready"] = "False" if is_engine and conditions.get(ADMITTED_GATE) != "True" else "True"
            if not wanted.items() <= conditions.items():
                self._mark(pod["metadata"]["name"], wanted)
        self._replicas = [
            {
                "name": pod["metadata"]["name"],
                "acknowledged_epoch": pod["metadata"]["uid"],
                "withdrawn": _conditions(pod).get("Ready") != "True",
            }
            for pod in found
            if pod["metadata"]["labels"][COMPONENT_LABEL] == ENGINE and _conditions(pod)
        ]

    def _mark(self, pod: str, wanted: dict[str, str]) -> None:
        rows = [
            {"type": type_, "status": status, "reason": _REASONS.get(type_, "")} for type_, status in wanted.items()
        ]
        status = {"phase": "Running", "podIP": self.address, "podIPs": [{"ip": self.address}], "conditions": rows}
        self._plane.call("PATCH", f"{self._pods}/{pod}/status", {"status": status}, kind=STRATEGIC)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        kubelet = self

        class StateHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                with suppress(OSError):  # the operator has ended
                    while not kubelet._stopping.wait(PERIOD_S):
                        state = {"type": "state", "state": {"replicas": kubelet._replicas}}
                        self.wfile.write(b"data:" + json.dumps(state).encode() + b"\n\n")

            def log_message(self, *_: Any) -> None:
                pass

        return StateHandler


#: As kubelets set it, so that the operator does not take the pod's node for lost.
_REASONS = {"Ready": "ReadinessGatesNotReady"}


def _conditions(pod: Raw) -> dict[str, str]:
    return {row["type"]: row["status"] for row in pod["status"].get("conditions", ())}
