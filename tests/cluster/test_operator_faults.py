"""An operator that is killed, whose writes fail, or whose view is late reaches the same final state."""

import asyncio
import itertools
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient
from octavo_operator.cluster.client import ApiError, path_of
from octavo_operator.plan.events import ACT_REASONS
from octavo_operator.spec.service import KIND
from octavo_testing.control_plane import ControlPlane
from octavo_testing.infsvc_cases import HOST, OPEN, Case
from octavo_testing.simulated_operator import (
    MERGE,
    WATCHED,
    Fault,
    Killed,
    SimulatedNodes,
    SimulatedOperator,
    connected,
    event_counts,
    namespace_state,
    no_fault,
)

NAME = "llm"
pytestmark = pytest.mark.slow

FAILURES: dict[str, tuple[BaseException, bool]] = {
    "conflict": (ApiError(409, "Conflict", "the object has been modified"), False),
    "too many requests": (ApiError(429, "TooManyRequests", "later"), False),
    "server error": (ApiError(500, "InternalError", "etcdserver: leader changed"), False),
    "no way to the server": (ConnectionRefusedError(), False),
    "done, but no answer": (TimeoutError(), True),
}


@pytest.fixture
async def api(plane: ControlPlane) -> AsyncIterator[ApiClient]:
    async with connected(plane) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(plane: ControlPlane) -> "Life":
    async def lead() -> Life:
        async with connected(plane) as client:
            return await Life(plane, client).lead()

    return asyncio.run(lead())


class Life:
    """The life of one service in steps; after each step the operator runs until it is idle."""

    def __init__(self, plane: ControlPlane, api: ApiClient) -> None:
        self.plane = plane
        self._api = api
        self.namespace = f"life-{secrets.token_hex(4)}"
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        self.nodes = SimulatedNodes(plane, self.namespace)
        self.num_kills = 0
        self.num_writes = 0

    def steps(self) -> Iterator[Callable[[], None]]:
        yield lambda: self._user("POST", "", Case("", {"exposure": HOST, "auth": OPEN}, name=NAME).manifest())
        yield lambda: self._edit({"drain": {"timeoutSeconds": 60}, "networkPolicy": {"enabled": False}})
        yield lambda: self._edit({"replicas": 2})
        yield lambda: self._edit({"model": {"uri": "pkg://another"}})
        yield lambda: self.plane.call("DELETE", path_of("Service", self.namespace, f"{NAME}-engines"))
        yield lambda: self._edit({"exposure": None, "auth": None, "replicas": 1})

    async def lead(self, fault: Fault = no_fault) -> "Life":
        """Run one operator after the other, each until it is killed. Failed work is retried, as by the queue."""
        operator = self.operator(fault)
        for step in self.steps():
            step()
            while True:
                try:
                    await operator.settle(self.nodes)
                    break
                except Killed:
                    self.num_kills += 1
                    self.num_writes += operator.cluster.num_writes
                    operator = self.operator(fault)
                except (ApiError, TimeoutError, OSError):
                    pass
        self.num_writes += operator.cluster.num_writes
        return self

    @property
    def result(self) -> dict[str, Any]:
        return namespace_state(self.plane, self.namespace)

    @property
    def transitions(self) -> Counter[str]:
        """Numbers of condition events by reason. Events of actions are left out: a killed operator can't send them."""
        return Counter({r: n for r, n in event_counts(self.plane, self.namespace).items() if r not in ACT_REASONS})

    def operator(self, fault: Fault = no_fault) -> SimulatedOperator:
        return SimulatedOperator(self._api, self.namespace, self.nodes, fault=fault)

    def _edit(self, spec: dict[str, Any]) -> None:
        self._user("PATCH", NAME, {"spec": spec}, kind=MERGE)

    def _user(self, method: str, name: str, body: dict[str, Any], kind: str = "") -> None:
        self.plane.call(method, path_of(KIND, self.namespace, name), body, kind=kind)


async def test_an_operator_killed_after_each_write_gets_the_same_result(
    plane: ControlPlane, api: ApiClient, undisturbed: Life
) -> None:
    killed = await Life(plane, api).lead(lambda count: (Killed(), True) if count == 1 else None)
    assert killed.num_kills >= undisturbed.num_writes - undisturbed.transitions.total()
    assert killed.result == undisturbed.result
    assert killed.transitions == undisturbed.transitions


@pytest.mark.parametrize("failure", FAILURES)
async def test_failing_writes_lead_to_the_same_result(
    plane: ControlPlane, api: ApiClient, undisturbed: Life, failure: str
) -> None:
    failing = await Life(plane, api).lead(lambda count: FAILURES[failure] if count % 2 else None)
    assert failing.result == undisturbed.result
    assert failing.transitions == undisturbed.transitions


@pytest.mark.parametrize("seed", range(3))
async def test_late_watches_lead_to_the_same_result(
    plane: ControlPlane, api: ApiClient, undisturbed: Life, seed: int
) -> None:
    """Serving pods stay while the view is late, and the final state is the same."""
    rng, late = random.Random(seed), Life(plane, api)
    operator = late.operator()
    for step in late.steps():
        step()
        for _ in range(6):
            before = _num_serving(late)
            await operator.watch([kind for kind in WATCHED if rng.random() < 0.5])
            with suppress(ApiError):
                await operator.reconcile()
            assert _num_serving(late) >= min(before, 1)
            late.nodes.settle()
        await operator.settle(late.nodes)
    assert late.result == undisturbed.result


def _num_serving(life: Life) -> int:
    pods = life.plane.call("GET", path_of("Pod", life.namespace))["items"]
    kept = {d["metadata"]["name"] for d in life.plane.call("GET", path_of("Deployment", life.namespace))["items"]}
    gates = itertools.chain.from_iterable(
        pod["status"].get("conditions", ()) for pod in pods if pod["metadata"]["labels"]["made-for"] in kept
    )
    return sum(gate["type"].endswith("router-admitted") and gate["status"] == "True" for gate in gates)
