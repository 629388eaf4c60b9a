"""The decisions about the replicas of one service: sleep, wake, and who else decides."""

from dataclasses import replace
from typing import Any

import pytest
from octavo_operator.observed import ScalingState
from octavo_operator.scaling.scaler import LAST_ACTIVE_EVERY_S, SYNC_S, TRUCE_S, Scaler, Seen
from octavo_operator.scaling.service_load import ServiceLoad
from octavo_operator.spec.autoscaling import Autoscaling, Provider

IDLE_S = 60


def _spec(**fields: Any) -> Autoscaling:
    return Autoscaling.model_validate({"maxReplicas": 4, "scaleToZero": {"idleSeconds": IDLE_S}} | fields)


def _load(requests: int = 0, *, unfinished: int = 0, kv: float = 0.0, waiting: int = 0) -> ServiceLoad:
    return ServiceLoad(
        kv_used_replicas=kv, waiting_requests=waiting, unfinished=unfinished, requests={"r": ("s", requests)}
    )


class Service:
    """A service, its clock, and its scaler, whose decisions are written as the operator does."""

    def __init__(self, provider: Provider = "HPA", *, replicas: int = 1, **spec: Any) -> None:
        self.provider, self.spec = provider, _spec(**spec)
        self.replicas, self.serving, self.held = replicas, replicas, 0
        self.load: ServiceLoad | None = _load()
        self.now_s = 1000.0
        self.scaler = Scaler(self.now_s)

    def step(self, seconds: float = 0.0, *, writes: bool = True) -> ScalingState:
        self.now_s += seconds
        seen = Seen(
            replicas=self.replicas,
            total=self.replicas,
            serving=self.serving,
            load=self.load,
            held=self.held,
            now_s=self.now_s,
            now=f"{self.now_s:.0f}",
        )
        found = self.scaler.step(self.spec, self.provider, seen)
        if writes and found.desired != self.replicas:
            self.scaler.wrote(self.spec, found.desired, self.now_s)
            self.replicas = found.desired
            self.serving = min(self.serving, self.replicas)
        return found


@pytest.mark.parametrize("provider", ["HPA", "Operator"])
def test_a_service_without_requests_goes_to_zero(provider: Provider) -> None:
    service = Service(provider)
    service.step()
    assert service.step(IDLE_S - 1).desired == 1
    found = service.step(1)
    assert (found.desired, found.reason) == (0, "ScaledToZero")
    assert service.step(1000) == replace(found, message="the next request starts a replica")


def test_short_requests_between_two_looks_keep_a_service_awake() -> None:
    service = Service()
    for requests in range(20):
        service.load = _load(requests)
        assert service.step(IDLE_S / 2).desired == 1
    assert service.step(IDLE_S).desired == 0


def test_a_long_request_keeps_a_service_awake() -> None:
    service = Service()
    service.load = _load(1, unfinished=1)
    assert service.step(10 * IDLE_S).desired == 1


def test_an_unknown_load_never_leads_to_zero() -> None:
    service = Service()
    service.load = None
    for _ in range(10):
        assert service.step(IDLE_S).desired == 1


@pytest.mark.parametrize(("least", "held", "desired"), [(1, 0, 0), (1, 1, 1), (3, 7, 3)])
def test_a_held_request_wakes_a_service(least: int, held: int, desired: int) -> None:
    service = Service(replicas=0, minReplicas=least)
    service.held, service.load = held, None  # a router that does not report delays no wake
    assert service.step().desired == desired


def test_the_length_of_a_wake_is_measured_until_a_replica_serves() -> None:
    service = Service(replicas=0)
    service.held = 1
    service.step()
    assert service.step(20).wake_s is None
    service.serving, service.held = 1, 0
    assert service.step(22).wake_s == 42
    assert service.step(1000).wake_s == 42


def test_a_wake_without_waiting_requests_is_not_measured() -> None:
    service = Service(replicas=0)
    service.held = 1
    service.step(writes=False)
    service.held = 0
    service.step(500)
    service.held = 1
    service.step(500)
    service.serving = 1
    assert service.step(5).wake_s == 5


def test_a_model_that_loads_for_longer_than_the_idle_time_is_not_stopped() -> None:
    service = Service(replicas=0)
    service.held = 1
    service.step()
    service.held = 0  # the request has expired
    for _ in range(10):
        assert service.step(IDLE_S).desired == 1
    service.serving = 1
    assert service.step(1).desired == 1
    assert service.step(IDLE_S).desired == 0


def test_a_service_at_zero_without_sleep_stays_there() -> None:
    service = Service(replicas=0, scaleToZero=None)
    service.held = 5
    assert (service.step().desired, service.step().reason) == (0, "Disabled")


def test_another_autoscaler_is_left_alone() -> None:
    service = Service("External", replicas=7, scaleToZero=None)
    assert (service.step(10_000).desired, service.step().reason) == (7, "External")


def test_the_last_activity_is_noted_at_most_every_minute() -> None:
    service = Service()
    service.load = _load(1)
    first = service.step().last_active
    service.load = _load(2)
    assert service.step(LAST_ACTIVE_EVERY_S / 2).last_active == first
    service.load = _load(3)
    assert service.step(LAST_ACTIVE_EVERY_S / 2).last_active == f"{service.now_s:.0f}"


def test_the_operator_scales_by_the_load() -> None:
    service = Service("Operator")
    service.load = _load(1, unfinished=9, kv=1.4)
    assert service.step().desired == 2
    service.load = _load(1, unfinished=9, kv=10.0)
    found = service.step(SYNC_S)
    assert (found.desired, found.reason) == (4, "AtMax")


def test_the_operator_decides_once_in_a_period() -> None:
    service = Service("Operator")
    service.step()
    service.load = _load(1, unfinished=9, kv=3.0)
    assert service.step(SYNC_S - 1).desired == 1
    assert service.step(1).desired == 4


def test_an_unknown_load_holds_the_replicas() -> None:
    service = Service("Operator", replicas=3)
    service.load = None
    found = service.step()
    assert (found.desired, found.reason) == (3, "MetricsUnavailable")


def test_the_operator_does_not_fight_with_another_client() -> None:
    service = Service("Operator", scaleToZero=None)
    service.load = _load(kv=1.5)
    assert service.step().desired == 2
    service.replicas = 3
    found = service.step(1)
    assert (found.desired, found.reason) == (3, "ScaledByOthers")
    assert service.step(TRUCE_S - 1).reason == "ScaledByOthers"
    assert service.step(1).reason == "Active"


def test_a_write_that_the_watch_delivers_late_is_not_another_clients() -> None:
    service = Service("Operator", scaleToZero=None)
    service.load = _load(kv=1.5)
    found = service.step(writes=False)
    service.scaler.wrote(service.spec, found.desired, service.now_s)
    assert service.step(SYNC_S, writes=False).reason == "Active"  # the old number is still seen
    service.scaler.wrote(service.spec, found.desired, service.now_s)
    service.replicas = found.desired
    assert service.step(SYNC_S).reason == "Active"
