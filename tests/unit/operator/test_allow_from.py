"""A service that may not use the router that it names: it gets no pods there, and those that run keep serving."""

from dataclasses import replace
from typing import Any

from octavo_operator.observed import Observed
from octavo_operator.plan.plan import Plan, plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS, PlanCluster

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
REF = {"router": {"ref": {"name": "other"}}}


def _service(generation: int = 1, **spec: Any) -> InferenceService:
    return read_service(stored(Case("", REF | spec, name="llm"), generation=generation))


def _refused(cluster: PlanCluster) -> Observed:
    return replace(cluster.observe(), may_use_router=False)


def _plan(service: InferenceService, observed: Observed) -> Plan:
    return plan(service, observed, SETTINGS, now="2026-01-01T00:00:00Z", new_secrets=SECRETS)


def _run(cluster: PlanCluster, service: InferenceService, *, is_refused: bool) -> None:
    for _ in range(10):
        made = _plan(service, _refused(cluster) if is_refused else cluster.observe())
        for action in made.actions:
            cluster.execute(action)
        cluster.status = made.status
        cluster.settle_pods()
        cluster.deliver_endpoints()


def test_a_service_that_is_not_listed_gets_nothing_and_a_reason_with_the_remedy() -> None:
    made = _plan(_service(), _refused(PlanCluster()))
    accepted = made.status["conditions"][0]
    assert made.actions == ()
    assert (accepted["type"], accepted["status"], accepted["reason"]) == ("Accepted", "False", "RouterNotAllowed")
    for part in (
        "InferenceService other ",
        "spec.router.allowFrom does not list llm",
        "add it there",
        "router.ref out",
    ):
        assert part in accepted["message"]


def test_a_router_that_does_not_exist_is_reported_as_such() -> None:
    (accepted, *_) = _plan(_service(), _refused(PlanCluster(shares=False))).status["conditions"]
    assert accepted["reason"] == "RouterNotFound"


def test_a_service_that_is_no_longer_listed_keeps_serving_and_its_edits_wait() -> None:
    cluster = PlanCluster()
    _run(cluster, _service(), is_refused=False)
    manifests = cluster.observe().engine_manifests
    _run(cluster, _service(), is_refused=True)
    assert (cluster.num_serving, cluster.engine_manifests) == (1, manifests)

    cluster.kill_pod(*cluster.pods)
    _run(cluster, _service(2, replicas=2, engine={"maxNumSeqs": 7}), is_refused=True)
    assert cluster.num_serving == 2, "a lost pod is replaced, and the service is scaled"
    assert cluster.engine_manifests.keys() == manifests.keys()
    assert cluster.status["conditions"][0]["reason"] == "RouterNotAllowed"

    _run(cluster, _service(2, replicas=2, engine={"maxNumSeqs": 7}), is_refused=False)
    assert cluster.engine_manifests.keys().isdisjoint(manifests)
    assert cluster.num_serving == 2
