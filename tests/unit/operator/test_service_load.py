"""The load of a service: replicas count once, routers are summed, and what is not reported is unknown."""

from typing import Any

import pytest
from octavo_operator.observed import Load, RouterReport
from octavo_operator.scaling.service_load import ServiceLoad, service_load


def _load(used: int = 0, *, running: int = 0, waiting: int = 0) -> Load:
    return Load(running=running, waiting=waiting, num_blocks=100, num_used_blocks=used)


def _report(pod: str, **fields: Any) -> RouterReport:
    return RouterReport(pod=pod, start=f"{pod}-start", **fields)


def test_kv_use_is_the_sum_over_the_admitted_replicas() -> None:
    loads = {"a": _load(50, running=2), "b": _load(75, running=3, waiting=4), "of another service": _load(100)}
    found = service_load(["llm"], ["a", "b"], {"r": _report("r", loads=loads)})
    assert found is not None
    assert (found.kv_used_replicas, found.waiting_requests, found.unfinished) == (1.25, 4, 9)


def test_the_freshest_report_of_a_replica_counts_and_only_once() -> None:
    old = _report("r1", loads={"a": _load(10, waiting=1)}, load_times={"a": 1.0})
    new = _report("r2", loads={"a": _load(80, waiting=5)}, load_times={"a": 2.0})
    for routers in ({"r1": old, "r2": new}, {"r2": new, "r1": old}):
        found = service_load(["llm"], ["a"], routers)
        assert found is not None
        assert (found.kv_used_replicas, found.waiting_requests) == (0.8, 5)


def test_requests_that_routers_keep_are_summed_over_the_services_models() -> None:
    counts = {"queue": {"llm": 2, "alias": 1, "other": 50}, "held": {"llm": 3}, "requests": {"llm": 10, "alias": 5}}
    routers = {name: _report(name, **counts) for name in ("r1", "r2")}
    assert service_load(["llm", "alias"], [], routers) == ServiceLoad(
        kv_used_replicas=0.0,
        waiting_requests=12,
        held=6,
        unfinished=12,
        requests={"r1": ("r1-start", 15), "r2": ("r2-start", 15)},
    )


def test_a_request_on_its_way_to_a_replica_is_unfinished() -> None:
    routers = {name: _report(name, loads={"a": _load()}, in_flight={"a": 1}) for name in ("r1", "r2")}
    found = service_load(["llm"], ["a"], routers)
    assert found is not None
    assert found.unfinished == 2


@pytest.mark.parametrize(
    ("admitted", "routers"),
    [
        pytest.param([], {}, id="no router"),
        pytest.param([], {"r1": _report("r1"), "r2": None}, id="a router is silent"),
        pytest.param(["a"], {"r1": _report("r1")}, id="no router reports the replica"),
        pytest.param(["a"], {"r1": _report("r1", loads={"a": Load()})}, id="the replica has not reported its blocks"),
    ],
)
def test_a_load_that_is_not_reported_is_unknown(admitted: list[str], routers: dict[str, RouterReport | None]) -> None:
    assert service_load(["llm"], admitted, routers) is None
