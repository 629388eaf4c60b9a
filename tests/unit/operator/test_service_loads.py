"""The load of a service, from the watched objects and the routers' reports."""

from collections.abc import Iterable
from typing import Any

import pytest
from octavo_operator.cluster.autoscaler import ServiceLoads
from octavo_operator.cluster.view import View
from octavo_operator.names import ADMITTED_GATE, REVISION_LABEL, ROUTER_LABEL, SERVICE_LABEL
from octavo_operator.observed import Load, RouterReport
from octavo_testing.infsvc_cases import Case, stored

READY = [{"type": "Ready", "status": "True"}]
ADMITTED = [*READY, {"type": ADMITTED_GATE, "status": "True"}]
FULL = Load(num_blocks=10, num_used_blocks=10)


class Reports:
    """The fresh reports of routers by pod."""

    def __init__(self, **reports: RouterReport) -> None:
        self._reports = {pod.replace("_", "-"): report for pod, report in reports.items()}

    def fresh(self, namespace: str, pods: Iterable[str]) -> dict[str, RouterReport]:
        return {pod: self._reports[pod] for pod in pods if pod in self._reports}


def _service(name: str, **spec: Any) -> dict[str, Any]:
    raw = stored(Case("", spec, name=name))
    raw["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return raw


def _pod(name: str, component: str, conditions: list[dict[str, str]], service: str = "llm") -> dict[str, Any]:
    labels = {
        SERVICE_LABEL: service,
        ROUTER_LABEL: "llm",
        REVISION_LABEL: "r",
        "app.kubernetes.io/component": component,
    }
    metadata = {"name": name, "namespace": "default", "uid": name, "labels": labels}
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions}
    return {"kind": "Pod", "metadata": metadata, "status": status}


@pytest.fixture
def view() -> View:
    view = View()
    for raw in (
        _service("llm", model={"uri": "hf://a/b", "servedNames": ["llm", "alias"]}),
        _service("guest", router={"ref": {"name": "llm"}}),
        _pod("router-0", "router", READY),
        _pod("llm-0", "engine", ADMITTED),
        _pod("llm-1", "engine", READY),
        _pod("guest-0", "engine", ADMITTED, service="guest"),
    ):
        view.update(raw)
    return view


def test_the_admitted_pods_and_models_of_a_service_count(view: View) -> None:
    loads = dict.fromkeys(("llm-0", "llm-1", "guest-0"), FULL)
    report = RouterReport(pod="router-0", loads=loads, held={"alias": 1, "guest": 5}, requests={"llm": 2, "guest": 7})
    found = ServiceLoads(view, Reports(router_0=report)).of(("default", "llm"))  # type: ignore[arg-type]
    assert found is not None
    assert (found.kv_used_replicas, found.held, found.requests) == (1.0, 1, {"router-0": ("", 2)})


@pytest.mark.parametrize("name", ["llm", "guest", "absent"])
def test_a_load_without_reports_is_unknown(view: View, name: str) -> None:
    assert ServiceLoads(view, Reports()).of(("default", name)) is None  # type: ignore[arg-type]
