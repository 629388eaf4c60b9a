"""Evictions during a rollout that is stuck: pods that don't start go at once, serving ones as replacements serve."""

from collections.abc import Sequence

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from octavo_e2e.background_client import BackgroundClient
from octavo_e2e.cluster import SMALL, Cluster, Raw, condition, exposed

HOST, NAME = "evicted.example.test", "evicted"
ENGINES = f"app.kubernetes.io/component=engine,serving.octavo.dev/service={NAME}"
REVISION = "serving.octavo.dev/revision"
REPLACED_S = 180


@pytest.fixture(scope="module")
def stuck(cluster: Cluster, namespace: str) -> str:
    """The namespace of a service with two serving replicas, and one of a revision whose image does not exist."""
    cluster.serve(namespace, NAME, **exposed(HOST), replicas=2)
    cluster.until_ready(namespace, NAME)
    image = {"image": "octavo.invalid/none:1"}
    cluster.serve(namespace, NAME, **exposed(HOST), replicas=2, engine=SMALL["engine"] | image)
    cluster.until_reason(namespace, NAME, "ImagePullError", of="WorkloadReady")
    return namespace


def test_evictions_during_a_stuck_rollout_lose_no_request(stuck: str, cluster: Cluster) -> None:
    first, second = _pods(cluster, stuck, is_serving=True)
    with BackgroundClient(cluster, HOST, stuck, NAME) as requests:
        _wait_for_budget(cluster, stuck)
        for pod in _pods(cluster, stuck, is_serving=False):
            assert _is_evicted(cluster, pod)
        assert _is_evicted(cluster, first)
        assert not _is_evicted(cluster, second), "only one replica was left, and was evicted"
        cluster.until("Pod", stuck, lambda pods: len(_stuck(pods)) == 1, label=ENGINES, within_s=60)
        assert all(_is_evicted(cluster, pod) for pod in _pods(cluster, stuck, is_serving=False))
        _wait_for_budget(cluster, stuck)
        assert _is_evicted(cluster, second)
        _wait_for_budget(cluster, stuck)
        requests.wait_for_responses(1, within_s=60)
    serving = _pods(cluster, stuck, is_serving=True)
    assert {pod["metadata"]["uid"] for pod in serving}.isdisjoint((first["metadata"]["uid"], second["metadata"]["uid"]))
    assert {pod["metadata"]["labels"][REVISION] for pod in serving} == {first["metadata"]["labels"][REVISION]}


def _wait_for_budget(cluster: Cluster, namespace: str) -> None:
    """Wait until two replicas serve again, so that one of them may be evicted."""

    def allows_one(budget: Raw) -> bool:
        return budget.get("status", {}).get("disruptionsAllowed") == 1

    cluster.until_one("PodDisruptionBudget", namespace, f"{NAME}-engine", allows_one, within_s=REPLACED_S)


def _pods(cluster: Cluster, namespace: str, *, is_serving: bool) -> list[Raw]:
    found = cluster.find("Pod", namespace, ENGINES)
    wanted = _serving(found) if is_serving else _stuck(found)
    assert len(wanted) == (2 if is_serving else 1)
    return wanted


def _serving(pods: Sequence[Raw]) -> list[Raw]:
    return [pod for pod in pods if _is_staying(pod) and condition(pod, "Ready").get("status") == "True"]


def _stuck(pods: Sequence[Raw]) -> list[Raw]:
    return [pod for pod in pods if _is_staying(pod) and pod["spec"]["containers"][0]["image"].startswith("octavo.inv")]


def _is_staying(pod: Raw) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def _is_evicted(cluster: Cluster, pod: Raw) -> bool:
    """Ask for the eviction of a pod, as `kubectl drain` does; return whether a budget allows it now."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=namespace))
    try:
        client.CoreV1Api(cluster.api).create_namespaced_pod_eviction(name, namespace, body)
    except ApiException as error:
        if error.status != 429:  # the budget's refusal
            raise
        return False
    return True
