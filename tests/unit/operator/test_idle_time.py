"""The idle time of a service ends with every request, and survives gaps in which no request can have been missed."""

import pytest
from octavo_operator.scaling.scaler import IdleTime
from octavo_operator.scaling.service_load import ServiceLoad


def _load(*, unfinished: int = 0, **requests: tuple[str, int]) -> ServiceLoad:
    return ServiceLoad(kv_used_replicas=0.0, waiting_requests=0, unfinished=unfinished, requests=requests)


QUIET = _load(a=("a1", 5), b=("b1", 7))


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        pytest.param(QUIET, 20.0, id="the same counts"),
        pytest.param(_load(a=("a1", 6), b=("b1", 7)), 0.0, id="a request that has ended already"),
        pytest.param(_load(unfinished=1, a=("a1", 5), b=("b1", 7)), 0.0, id="a request that still runs"),
        pytest.param(_load(a=("a2", 5), b=("b1", 7)), 0.0, id="a router that restarted with the same count"),
        pytest.param(_load(a=("a1", 5)), 0.0, id="a router less"),
        pytest.param(_load(a=("a1", 5), b=("b1", 7), c=("c1", 0)), 0.0, id="a router more"),
        pytest.param(None, None, id="unknown"),
    ],
)
def test_what_ends_the_idle_time(load: ServiceLoad | None, expected: float | None) -> None:
    idle = IdleTime(100.0)
    idle.observe(QUIET, 100.0)
    idle.observe(load, 120.0)
    assert idle.seconds(120.0) == expected


@pytest.mark.parametrize(("after", "expected"), [(QUIET, 60.0), (_load(a=("a2", 0), b=("b1", 7)), 0.0)])
def test_a_gap_counts_as_idle_if_the_same_routers_report_the_same_counts(after: ServiceLoad, expected: float) -> None:
    idle = IdleTime(0.0)
    idle.observe(QUIET, 0.0)
    idle.observe(None, 30.0)
    assert idle.seconds(30.0) is None
    idle.observe(after, 60.0)
    assert idle.seconds(60.0) == expected


def test_a_service_is_not_idle_before_its_first_report() -> None:
    idle = IdleTime(0.0)
    assert idle.seconds(1000.0) is None
    idle.observe(QUIET, 1000.0)
    assert idle.seconds(1010.0) == 10.0
