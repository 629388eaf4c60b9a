"""Replicas of several pods: their LeaderWorkerSet, its place in the view, and its rollout from and to a Deployment."""

from dataclasses import replace
from typing import Any

import pytest
from octavo_operator.cluster.view import View
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import desired_engine, engine_revision, served_names
from octavo_operator.names import (
    ADMITTED_GATE,
    COMPONENT_LABEL,
    GROUP_SET,
    REVISION_LABEL,
    SERVICE_LABEL,
    engine_selector,
)
from octavo_operator.observed import Observed
from octavo_operator.plan.plan import plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.plan_cluster import SECRETS, PlanCluster, settle

SETTINGS = Settings(
    engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system", has_group_sets=True
)
PODS = {"parallelism": {"tensor": 4, "nodes": 2}}


def _service(name: str = "llm", **spec: Any) -> InferenceService:
    return read_service(stored(Case("", spec, name=name)))


def _made(**spec: Any) -> dict[str, Any]:
    return desired_engine(_service(**PODS, **spec), SETTINGS, replicas=3)


def _template(role: str, made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made["spec"]["leaderWorkerTemplate"][f"{role}Template"]
    return found


def _engine(role: str, made: dict[str, Any]) -> dict[str, Any]:
    (container,) = _template(role, made)["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def test_a_revision_is_a_set_of_groups_of_pods() -> None:
    made = _made()
    revision = engine_revision(_service(**PODS), SETTINGS)
    assert (made["apiVersion"], made["kind"]) == ("leaderworkerset.x-k8s.io/v1", GROUP_SET)
    assert made["metadata"]["name"] == f"llm-{revision}"
    assert made["metadata"]["labels"][REVISION_LABEL] == revision
    assert {key: value for key, value in made["spec"].items() if key != "leaderWorkerTemplate"} == {
        "replicas": 3,
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
    }
    group = made["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "None")
    assert served_names(made) == {"llm"}


def test_the_longest_name_leaves_room_for_the_names_of_pods() -> None:
    made = desired_engine(_service(name="a" * 40, **PODS), SETTINGS, replicas=1)
    assert len(made["metadata"]["name"]) == 49


def test_only_the_leader_is_an_engine_for_all_others() -> None:
    made = _made()
    labels = [_template(role, made)["metadata"]["labels"] for role in ("leader", "worker")]
    assert [each[COMPONENT_LABEL] for each in labels] == ["engine", "engine-worker"]
    assert [engine_selector("llm").items() <= each.items() for each in labels] == [True, False]
    assert labels[0][REVISION_LABEL] == labels[1][REVISION_LABEL]
    leader, worker = (_template(role, made)["spec"] for role in ("leader", "worker"))
    assert leader["readinessGates"] == [{"conditionType": ADMITTED_GATE}]
    assert "readinessGates" not in worker
    assert worker["terminationGracePeriodSeconds"] == leader["terminationGracePeriodSeconds"] + 30


def test_the_pods_of_a_replica_find_each_other() -> None:
    leader, worker = (_engine(role, _made(engine={"extraArgs": ["--seed=1"]})) for role in ("leader", "worker"))
    assert leader["args"][-4:-1] == ["--nnodes=2", "--node-rank=0", "--master-addr=$(POD_IP)"]
    assert worker["args"][-5:-1] == [
        *("--nnodes=2", "--headless", "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)")
    ]
    assert "--tensor-parallel-size=4" in leader["args"]
    assert {*leader["args"]} - {*worker["args"]} == {*leader["args"][-3:-1]}
    for container in (leader, worker):
        variables = {each["name"]: each.get("valueFrom") for each in container["env"]}
        assert variables["OCTAVO_GROUP_SECRET"] == {"secretKeyRef": {"name": "llm-group-secret", "key": "secret"}}
        assert variables["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert [worker[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")] == [
        *("/health", "/ready", "/health")
    ]
    others = [{k: v for k, v in each.items() if k != "args"} for each in (leader, worker)]
    assert others[0] == others[1]


def test_a_pod_template_applies_to_all_pods() -> None:
    made = _made(engine={"podTemplate": {"spec": {"hostname": "x", "containers": [{"name": "side", "image": "i"}]}}})
    for role in ("leader", "worker"):
        spec = _template(role, made)["spec"]
        assert ([each["name"] for each in spec["containers"]], spec["hostname"]) == (["engine", "side"], "x")


def _policies(**spec: Any) -> dict[str, dict[str, Any]]:
    made = desired_children(_service(**spec), SETTINGS)
    return {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "NetworkPolicy"}


def test_only_the_pods_of_a_service_reach_each_other_on_all_ports() -> None:
    pods = {
        "matchLabels": {SERVICE_LABEL: "llm"},
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": ["engine", "engine-worker"]}],
    }
    policy = _policies(**PODS)["llm-engine-group"]
    assert policy == {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": pods}]}],
    }
    closed = _policies(**PODS, networkPolicy={"egressTo": []})["llm-engine-group"]
    dns, peers = closed["egress"]
    assert ({port["port"] for port in dns["ports"]}, peers) == ({53, 5353}, {"to": [{"podSelector": pods}]})
    behind = _policies(**PODS, router={"ref": {"name": "other"}})
    assert {*behind} == {"llm-engine-group"}
    assert _policies(**PODS, networkPolicy={"enabled": False}) == {}
    assert {*_policies()} == {"llm-engine", "llm-router"}


def test_the_limits_of_a_shared_router_leave_leaders_their_workers() -> None:
    """The policy of the service with the router selects the leaders of all services behind it, and no workers."""
    engines = _policies(networkPolicy={"egressTo": []})["llm-engine"]
    made = desired_engine(_service(name="b", router={"ref": {"name": "llm"}}, **PODS), SETTINGS, replicas=1)
    leader, worker = (_template(role, made)["metadata"]["labels"].items() for role in ("leader", "worker"))
    assert [engines["podSelector"]["matchLabels"].items() <= pod for pod in (leader, worker)] == [True, False]
    _, workers = engines["egress"]
    (peer,) = workers["to"]
    assert [peer["podSelector"]["matchLabels"].items() <= pod for pod in (leader, worker)] == [False, True]
    assert "ports" not in workers


def test_budgets_services_and_monitors_see_leaders_only() -> None:
    made = desired_children(_service(**PODS), replace(SETTINGS, has_pod_monitors=True))
    selected = [each["spec"]["selector"] for each in made if "selector" in each.get("spec", {})]
    assert len(selected) > 4
    worker = _template("worker", _made())["metadata"]["labels"]
    assert [s for s in selected if s.get("matchLabels", s).items() <= worker.items()] == []


@pytest.mark.parametrize(
    ("spec", "is_other"),
    [
        ({"parallelism": {"tensor": 4, "nodes": 4}}, True),
        ({"parallelism": {"tensor": 2, "nodes": 2}}, True),
        (PODS | {"engine": {"env": [{"name": "A", "value": "1"}]}}, True),
        (PODS | {"replicas": 5}, False),
    ],
    ids=str,
)
def test_a_revision_is_the_hash_of_both_templates_and_the_size(spec: dict[str, Any], is_other: bool) -> None:
    revisions = {engine_revision(_service(**each), SETTINGS) for each in (PODS, spec)}
    assert len(revisions) == 1 + is_other


def test_a_set_without_its_api_is_not_accepted() -> None:
    planned = plan(_service(**PODS), Observed(), replace(SETTINGS, has_group_sets=False), now="t", new_secrets=SECRETS)
    assert (planned.actions, planned.status["conditions"][0]["reason"]) == ((), "NoLeaderWorkerSets")
    alone = _service(parallelism={"tensor": 4, "nodes": 1})
    assert plan(alone, Observed(), SETTINGS, now="t", new_secrets=SECRETS).status["conditions"][0]["reason"] == "Valid"


@pytest.mark.parametrize(
    ("limits", "reason", "remedy"),
    [
        ({"nvidia.com/gpu": 2}, "Valid", ""),
        ({"nvidia.com/gpu": 4}, "UnusedGpus", "each pod requests 4 GPUs, but its engine computes on 2"),
        ({"nvidia.com/gpu": 4}, "UnusedGpus", "request 2, or set parallelism.tensor to 8"),
        ({"nvidia.com/gpu": 1}, "TooFewGpus", "tensor is 4 and parallelism.nodes is 2, and each rank needs a whole"),
        ({"nvidia.com/gpu": 1}, "TooFewGpus", "each pod requests 1: set nvidia.com/gpu to 2 in resources"),
        ({"cpu": 2}, "Valid", ""),
        ({"cpu": 1}, "TooFewCpus", "allows 1: raise it to 2 or more"),
    ],
    ids=str,
)
def test_resources_are_those_of_each_pod(limits: dict[str, Any], reason: str, remedy: str) -> None:
    service = _service(**PODS, resources={"limits": limits})
    accepted = plan(service, Observed(), SETTINGS, now="t", new_secrets=SECRETS).status["conditions"][0]
    assert accepted["reason"] == reason
    assert remedy in accepted["message"]


@pytest.mark.parametrize(("access", "reason"), [({}, "ClaimIsForOneNode"), ({"accessMode": "ReadWriteMany"}, "Valid")])
def test_one_replica_of_two_pods_shares_its_claim(access: dict[str, str], reason: str) -> None:
    cache = {"mode": "PVC", "size": "1Gi"} | access
    service = _service(**PODS, replicas=1, model={"uri": "hf://Qwen/Qwen3-0.6B", "cache": cache})
    accepted = plan(service, Observed(), SETTINGS, now="t", new_secrets=SECRETS).status["conditions"][0]
    assert accepted["reason"] == reason
    assert reason == "Valid" or accepted["message"].startswith("2 pods share")


def test_the_secret_comes_before_the_pods_and_once() -> None:
    actions = plan(_service(**PODS), Observed(), SETTINGS, now="t", new_secrets=SECRETS).actions
    made = [str(action) for action in actions if "llm-group-secret" in str(action)]
    assert len(made) == 2  # the Secret, then the set
    assert made[0].startswith("CreateOnce")
    cluster = PlanCluster()
    settle(cluster, _service(**PODS), SETTINGS)
    assert cluster.secrets["llm-group-secret"] == SECRETS.group
    again = plan(_service(**PODS, replicas=2), cluster.observe(), SETTINGS, now="t", new_secrets=SECRETS)
    assert [action for action in again.actions if str(action).startswith("CreateOnce")] == []


@pytest.mark.parametrize(("before", "after"), [({}, PODS), (PODS, {}), (PODS, PODS | {"engine": {"maxNumSeqs": 3}})])
def test_a_rollout_from_one_kind_to_another_keeps_the_replicas(before: dict[str, Any], after: dict[str, Any]) -> None:
    cluster = PlanCluster()
    settle(cluster, _service(**before, replicas=2), SETTINGS)
    assert cluster.num_serving == 2
    settle(cluster, read_service(stored(Case("", after | {"replicas": 2}, name="llm"), generation=2)), SETTINGS)
    (made,) = cluster.engine_deployments.values()
    assert (made.kind, cluster.num_serving, cluster.num_cut) == (GROUP_SET if after else "Deployment", 2, 0)


def _live() -> dict[str, Any]:
    made = _made()
    more = {"uid": "u", "resourceVersion": "7", "creationTimestamp": "1"}
    return made | {"metadata": made["metadata"] | more, "status": {"replicas": 3, "conditions": []}}


def test_the_view_has_sets_and_the_ordinals_of_their_leaders() -> None:
    view, live = View(), _live()
    view.update(live)
    for name, role in (("a-2", "leader"), ("a-2-1", "worker")):
        labels = _template(role, live)["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/group-index": "2"}
        metadata = {"name": name, "namespace": "default", "uid": name, "labels": labels}
        view.update({"kind": "Pod", "metadata": metadata, "status": {}})
    seen = view.observed(_service(**PODS), {})
    (found,) = seen.engine_deployments
    assert (found.kind, found.name, found.replicas) == (GROUP_SET, live["metadata"]["name"], 3)
    assert [(pod.name, pod.ordinal) for pod in seen.pods] == [("a-2", 2)]
    assert [pod.name for pod in seen.pods[0].workers] == ["a-2-1"]
    assert dict(seen.children) == {}
