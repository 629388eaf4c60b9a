"""examples/shared_router.yaml: the model name selects one of two services behind one router and host."""

import json
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor

import pytest
from octavo_e2e.cluster import Cluster, Raw
from octavo_e2e.providers import ROOT
from openai import NotFoundError

HOST, KEY = "team.example.test", "change-this-key-of-team-a"
NAMES = ("chat", "summaries")
ROUTERS = "app.kubernetes.io/component=router"
SUMMARIES = "serving.octavo.dev/service=summaries,app.kubernetes.io/component=engine"


def test_the_model_name_selects_the_service(cluster: Cluster, namespace: str) -> None:
    cluster.apply(ROOT / "examples" / "shared_router.yaml", namespace)
    for name in NAMES:
        cluster.until_ready(namespace, name)
    routers = cluster.find("Pod", namespace, ROUTERS)
    assert [pod["metadata"]["labels"]["serving.octavo.dev/service"] for pod in routers] == ["chat", "chat"]
    with cluster.openai(HOST, KEY) as client:
        assert {model.id for model in client.models.list().data} == set(NAMES)
        for name in NAMES:
            raw = client.completions.with_raw_response.create(model=name, prompt="Once", max_tokens=2)
            assert raw.parse().model == name
            assert not [header for header in raw.headers if header.startswith("x-octavo-")]
            assert _chosen(cluster, routers)[raw.headers["x-request-id"]].startswith(f"{name}-engine-")
        with pytest.raises(NotFoundError, match="third"):
            client.completions.create(model="third", prompt="Once")


def test_new_routers_hold_requests_for_a_model_without_replicas(cluster: Cluster, namespace: str) -> None:
    """The routers have never seen a replica of the model: they know it from the operator's ConfigMap."""
    cluster.kubectl("scale", "infsvc", "summaries", "--replicas=0", "-n", namespace)
    cluster.until("Pod", namespace, lambda pods: not pods, label=SUMMARIES, within_s=120, what="no engine of summaries")
    old = {pod["metadata"]["uid"] for pod in cluster.find("Pod", namespace, ROUTERS)}
    cluster.kubectl("delete", "pod", "-l", ROUTERS, "-n", namespace)
    cluster.until("Pod", namespace, lambda pods: _are_new(pods, old), label=ROUTERS, within_s=120, what="new routers")
    with cluster.openai(HOST, KEY) as client, ThreadPoolExecutor(1) as pool:
        assert {model.id for model in client.models.list().data} == set(NAMES)
        with pytest.raises(NotFoundError, match="third"):
            client.completions.create(model="third", prompt="Once")
        held = pool.submit(client.completions.create, model="summaries", prompt="Once", max_tokens=2)
        cluster.kubectl("scale", "infsvc", "summaries", "--replicas=1", "-n", namespace)
        assert held.result(timeout=60).model == "summaries"


def _are_new(pods: Sequence[Raw], old: Set[str]) -> bool:
    conditions = [c for pod in pods for c in pod["status"].get("conditions", ()) if c["type"] == "Ready"]
    num_ready = sum(condition["status"] == "True" for condition in conditions)
    return num_ready == len(pods) == 2 and old.isdisjoint(pod["metadata"]["uid"] for pod in pods)


def _chosen(cluster: Cluster, routers: Sequence[Raw]) -> dict[str, str]:
    """Request id -> replica, as the routers report their latest decisions."""
    command = ("octavo", "explain", "decisions", "--url", "http://127.0.0.1:8001", "--json")
    pods = (pod["metadata"] for pod in routers)
    outputs = [cluster.kubectl("exec", "-n", pod["namespace"], pod["name"], "--", *command) for pod in pods]
    decisions = map(json.loads, "".join(outputs).splitlines())
    return {decision["request_id"]: decision["chosen"] for decision in decisions}
