"""The operator's metrics API behind a real API server: values by `kubectl get --raw`, and an HPA of a service."""

import json
import os
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from octavo_operator.metrics_api.server import GROUP_VERSION, RESOURCE
from octavo_testing.component import Component
from octavo_testing.control_plane import GARBAGE, HPA, LIMIT_S, ControlPlane, control_plane, missing_tools
from octavo_testing.infsvc_cases import Case
from octavo_testing.metrics_api import API_SERVICES, api_objects
from octavo_testing.serve_command import free_port

SYSTEM, TEAM, NAME = "octavo-system", "team", "octavo-metrics-api"
SERVICES = f"/apis/serving.octavo.dev/v1alpha1/namespaces/{TEAM}/inferenceservices"
HPAS = f"/apis/autoscaling/v2/namespaces/{TEAM}/horizontalpodautoscalers"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    if missing := missing_tools():
        pytest.skip(missing)
    with control_plane(tmp_path_factory.mktemp("plane"), controllers=(GARBAGE, HPA), hpa_sync_s=1) as running:
        for namespace in (SYSTEM, TEAM):
            running.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        yield running


@pytest.fixture(scope="module")
def operator(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Component]:
    """An operator whose port the API server reaches as Service NAME."""
    port, folder = free_port(), tmp_path_factory.mktemp("operator")
    for path, made in api_objects(SYSTEM, port, name=NAME):
        plane.call("POST", path, made)
    args = ["--engine-image=engine", "--router-image=router", f"--lease-namespace={SYSTEM}", "--key-secret=key"]
    args += [f"--metrics-api-port={port}", f"--metrics-api-service={NAME}", "--identity=octavo-0"]
    args.append(f"--liveness=http://127.0.0.1:{free_port()}/healthz")
    environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig())}
    command = [sys.executable, "-m", "octavo_operator.main", *args]
    running = Component("operator", command, folder / "operator.log", environment)
    running.start()
    yield running
    running.stop()


def _until(holds: Callable[[], bool], operator: Component) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        operator.assert_running()
        assert time.monotonic() < deadline, operator.log_tail()
        time.sleep(0.1)


def _failure(plane: ControlPlane, path: str) -> dict[str, Any]:
    """The Status that answers a request, or nothing if it is answered."""
    try:
        plane.call("GET", path)
    except urllib.error.HTTPError as error:
        content = error.read()
        return dict(json.loads(content)) if content.startswith(b"{") else {"message": content.decode()}
    return {}


def test_the_api_is_served_through_the_api_server(plane: ControlPlane, operator: Component) -> None:
    path = f"/apis/{GROUP_VERSION}/namespaces/{TEAM}/{RESOURCE}/absent/kv_used_replicas"
    _until(lambda: "does not exist" in _failure(plane, path).get("message", ""), operator)
    assert _failure(plane, path)["reason"] == "NotFound"
    found = plane.call("GET", f"/apis/{GROUP_VERSION}")
    assert {resource["kind"] for resource in found["resources"]} == {"MetricValueList"}
    api = plane.call("GET", f"{API_SERVICES}/{'.'.join(reversed(GROUP_VERSION.split('/')))}")
    assert {row["type"]: row["status"] for row in api["status"]["conditions"]} == {"Available": "True"}


def test_a_service_gets_an_hpa_that_asks_for_its_metrics(plane: ControlPlane, operator: Component) -> None:
    scaling = {"minReplicas": 2, "maxReplicas": 3}
    plane.call("POST", SERVICES, Case("", {"replicas": 1, "autoscaling": scaling}, name="llm").manifest())
    _until(lambda: plane.call("GET", f"{SERVICES}/llm")["spec"]["replicas"] == 2, operator)  # by the HPA
    # No router reports, so the load is unknown.
    _until(lambda: "FailedGetObjectMetric" in _scaling(plane).get("message", ""), operator)
    assert _scaling(plane)["reason"] == "MetricsUnavailable"
    hpa = plane.call("GET", f"{HPAS}/llm")
    assert hpa["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_another_provider_removes_the_hpa_and_keeps_the_count(plane: ControlPlane, operator: Component) -> None:
    patch = {"spec": {"autoscaling": {"provider": "External"}}}
    plane.call("PATCH", f"{SERVICES}/llm", patch, kind="application/merge-patch+json")
    _until(lambda: plane.call("GET", HPAS)["items"] == [], operator)
    _until(lambda: _scaling(plane).get("reason") == "External", operator)
    assert plane.call("GET", f"{SERVICES}/llm")["spec"]["replicas"] == 2


def _scaling(plane: ControlPlane) -> dict[str, Any]:
    rows = plane.call("GET", f"{SERVICES}/llm").get("status", {}).get("conditions", ())
    return next((row for row in rows if row["type"] == "ScalingReady"), {})
