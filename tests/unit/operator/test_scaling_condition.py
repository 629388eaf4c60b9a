"""Autoscaling in the plan: the HPA, the condition ScalingReady, the status, and Ready at zero replicas."""

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from octavo_operator.desired.autoscaler import HPA, desired_autoscaler, provider_of
from octavo_operator.desired.children import desired_children
from octavo_operator.observed import Observed, RouterReport, ScalingReason, ScalingState, ServiceBehind
from octavo_operator.plan.conditions import REASONS
from octavo_operator.plan.plan import plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_operator.spec.autoscaling import Provider
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
WITH_API = replace(SETTINGS, has_metrics_api=True)
SLEEP = {"scaleToZero": {"idleSeconds": 60}}
ROUTERS = {"r": RouterReport(pod="r")}


def _service(replicas: int = 1, **autoscaling: Any) -> InferenceService:
    scaling = {"maxReplicas": 4} | autoscaling
    return read_service(stored(Case("", {"replicas": replicas, "autoscaling": scaling}, name="llm")))


def _hpa(**conditions: tuple[str, str]) -> dict[str, Any]:
    rows = {"ScalingActive": ("True", "ValidMetricFound"), "AbleToScale": ("True", "ReadyForNewScale")} | conditions
    listed = [{"type": t, "status": s, "reason": r, "message": "words"} for t, (s, r) in rows.items()]
    return {"kind": HPA, "metadata": {"name": "llm"}, "status": {"desiredReplicas": 3, "conditions": listed}}


def _planned(
    service: InferenceService, observed: Observed, settings: Settings = SETTINGS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The conditions by type, and the status field `autoscaling`."""
    made = plan(service, observed, settings, now="2026-01-01T00:00:00Z", new_secrets=SECRETS)
    return {row["type"]: row for row in made.status["conditions"]}, made.status.get("autoscaling", {})


@pytest.mark.parametrize(
    ("provider", "has_api", "expected"),
    [
        (None, True, "HPA"),
        (None, False, "Operator"),
        ("HPA", True, "HPA"),
        ("HPA", False, "Operator"),
        ("Operator", True, "Operator"),
        ("External", True, "External"),
    ],
)
def test_an_hpa_decides_where_the_metrics_api_is_the_operators(
    provider: str | None, has_api: bool, expected: Provider
) -> None:
    service = _service(**({} if provider is None else {"provider": provider}))
    settings = WITH_API if has_api else SETTINGS
    assert service.spec.autoscaling is not None
    assert provider_of(service.spec.autoscaling, settings) == expected
    assert len(desired_autoscaler(service, settings)) == (expected == "HPA")


def test_the_hpa_has_sums_as_metrics_and_the_users_behavior() -> None:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 60, "selectPolicy": "Min"}}
    metrics = [{"type": "KVUtilization", "average": "0.5"}, {"type": "WaitingRequests", "average": 3}]
    (made,) = desired_autoscaler(_service(minReplicas=2, metrics=metrics, behavior=behavior), WITH_API)
    spec = made["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 4)
    assert spec["behavior"]["scaleDown"].items() >= behavior["scaleDown"].items()
    assert spec["behavior"]["scaleUp"]["selectPolicy"] == "Max"  # an HPA without behavior follows an older algorithm
    assert spec["scaleTargetRef"] == {
        "apiVersion": "serving.octavo.dev/v1alpha1",
        "kind": "InferenceService",
        "name": "llm",
    }
    targets = {m["object"]["metric"]["name"]: m["object"]["target"] for m in spec["metrics"]}
    assert targets == {
        "kv_used_replicas": {"type": "AverageValue", "averageValue": "500m"},
        "waiting_requests": {"type": "AverageValue", "averageValue": "3"},
    }


def test_metrics_have_default_averages() -> None:
    (made,) = desired_autoscaler(_service(), WITH_API)
    assert [m["object"]["target"]["averageValue"] for m in made["spec"]["metrics"]] == ["750m", "2"]


@pytest.mark.parametrize(
    ("hpa", "reason", "status"),
    [
        pytest.param(_hpa(), "Active", "True", id="decides"),
        pytest.param(_hpa(ScalingLimited=("True", "TooManyReplicas")), "AtMax", "True", id="at the most"),
        pytest.param(_hpa(ScalingLimited=("True", "TooFewReplicas")), "Active", "True", id="at the least"),
        pytest.param(_hpa(ScalingActive=("False", "FailedGetObjectMetric")), "MetricsUnavailable", "Unknown", id="404"),
        pytest.param(_hpa(ScalingActive=("False", "ScalingDisabled")), "Disabled", "False", id="disabled"),
        pytest.param(_hpa(AbleToScale=("False", "AmbiguousSelector")), "ScaledByOthers", "False", id="two HPAs"),
        pytest.param({"kind": HPA, "metadata": {"name": "llm"}}, "MetricsUnavailable", "Unknown", id="new"),
    ],
)
def test_the_condition_follows_the_hpa(hpa: dict[str, Any], reason: str, status: str) -> None:
    seen = Observed(children={(HPA, "llm"): hpa}, scaling=ScalingState(1, "Active", ""))
    conditions, found = _planned(_service(), seen, WITH_API)
    assert (conditions["ScalingReady"]["reason"], conditions["ScalingReady"]["status"]) == (reason, status)
    assert found["reason"] == reason
    assert found["desired"] == (1 if "status" not in hpa else 3)


@pytest.mark.parametrize("reason", get_args(ScalingReason))
def test_every_decision_of_the_operator_is_shown(reason: ScalingReason) -> None:
    conditions, found = _planned(_service(provider="Operator"), Observed(scaling=ScalingState(2, reason, "why")))
    assert conditions["ScalingReady"]["status"] == REASONS["ScalingReady"][reason]
    assert (found["desired"], found["reason"]) == (2, reason)


def test_a_service_without_autoscaling_has_no_condition_about_it() -> None:
    service = read_service(stored(Case("", {}, name="llm")))
    conditions, found = _planned(service, Observed(scaling=None, status={"autoscaling": {"desired": 1}}))
    assert "ScalingReady" not in conditions
    assert found == {}


def test_the_condition_says_why_the_operator_decides_in_place_of_an_hpa() -> None:
    conditions, _ = _planned(_service(provider="HPA"), Observed(scaling=ScalingState(1, "Active", "")))
    assert "has no metrics for an HPA" in conditions["ScalingReady"]["message"]


def test_a_service_that_sleeps_is_ready_and_idle() -> None:
    seen = Observed(routers=ROUTERS, scaling=ScalingState(0, "ScaledToZero", "why"))
    conditions, _ = _planned(_service(0, **SLEEP), seen)
    ready = conditions["Ready"]
    assert (ready["status"], ready["reason"], conditions["ReplicasAdmitted"]["reason"]) == ("True", "Idle", "Idle")


def test_a_service_at_zero_that_nothing_wakes_is_not_ready() -> None:
    conditions, _ = _planned(_service(0), Observed(routers=ROUTERS, scaling=ScalingState(0, "Disabled", "why")))
    assert (conditions["Ready"]["status"], conditions["Ready"]["reason"]) == ("False", "NoReplicas")


def test_unavailable_metrics_do_not_hold_up_ready() -> None:
    seen = Observed(routers=ROUTERS, scaling=ScalingState(0, "MetricsUnavailable", "why"))
    conditions, _ = _planned(_service(0, **SLEEP), seen)
    assert conditions["Ready"]["status"] == "True"


def test_the_length_of_the_last_wake_outlives_the_operator_that_measured_it() -> None:
    status = {"autoscaling": {"desired": 1, "reason": "Active", "wakeSeconds": 41}}
    state = ScalingState(1, "Active", "", last_active="2026-01-01T00:00:00Z")
    _, found = _planned(_service(**SLEEP), Observed(scaling=state, status=status))
    assert (found["wakeSeconds"], found["lastActive"]) == (41, "2026-01-01T00:00:00Z")
    _, found = _planned(_service(**SLEEP), Observed(scaling=replace(state, wake_s=7), status=status))
    assert found["wakeSeconds"] == 7
    _, found = _planned(_service(**SLEEP), Observed(status=status))
    assert found == status["autoscaling"]


def test_routers_get_the_services_that_sleep_and_the_length_of_their_wakes() -> None:
    behind = {"llm": ServiceBehind(("llm",)), "guest": ServiceBehind(("g", "h"), sleeps=True, wake_s=30)}
    children = desired_children(_service(), SETTINGS, behind_router=behind)
    (config,) = (child for child in children if child["kind"] == "ConfigMap")
    (content,) = config["data"].values()
    assert json.loads(content)["services"] == [
        {"name": "guest", "models": ["g", "h"], "sleeps": True, "wakeSeconds": 30},
        {"name": "llm", "models": ["llm"]},
    ]
