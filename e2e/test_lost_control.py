"""The operator and the API server are killed and restarted: services keep serving, and started work is finished."""

import time

import pytest
from octavo_e2e.background_client import BackgroundClient
from octavo_e2e.cluster import SYSTEM, Cluster
from octavo_e2e.providers import Provider
from octavo_e2e.release import SELECTOR, UP_S

pytestmark = pytest.mark.last

HOST = "smollm2.example.test"
AWAY_S = 25  # longer than the operator's Lease


def _containers(cluster: Cluster, namespace: str) -> set[tuple[str, int]]:
    pods = cluster.find("Pod", namespace, "serving.octavo.dev/service=smollm2")
    return {(p["metadata"]["uid"], p["status"]["containerStatuses"][0]["restartCount"]) for p in pods}


def test_killed_operators_finish_their_work_after_restart(smollm2: str, cluster: Cluster, namespace: str) -> None:
    before = _containers(cluster, smollm2)
    killed = {pod["metadata"]["name"] for pod in cluster.find("Pod", SYSTEM, SELECTOR)}
    with BackgroundClient(cluster, HOST, smollm2, "smollm2") as requests:
        cluster.serve(namespace, "begun")
        cluster.until("ServiceAccount", namespace, lambda found: len(found) > 1, within_s=30, what="the first child")
        cluster.kubectl("delete", "pod", *killed, "-n", SYSTEM, "--grace-period=0", "--force", "--wait=false")
        cluster.until_ready(namespace, "begun")
        requests.wait_for_responses(1, within_s=60)
    assert killed.isdisjoint(pod["metadata"]["name"] for pod in cluster.find("Pod", SYSTEM, SELECTOR))
    assert _containers(cluster, smollm2) == before


def test_serving_does_not_depend_on_the_api_server(
    smollm2: str, cluster: Cluster, namespace: str, provider: Provider
) -> None:
    if provider.tools is None:
        pytest.skip(f"only ../shared/k8s can kill its API server, this cluster is {provider.name}")
    before = _containers(cluster, smollm2)
    with BackgroundClient(cluster, HOST, smollm2, "smollm2") as requests:
        provider.run(str(provider.tools / "kill"), "apiserver")
        end = time.monotonic() + AWAY_S
        while time.monotonic() < end:
            requests.wait_for_responses(1, within_s=60)
        provider.run(str(provider.tools / "restart"), "apiserver")
        cluster.until("Namespace", None, bool, within_s=60)
        cluster.serve(namespace, "after", replicas=0)
        cluster.until_reason(namespace, "after", "NoReplicas", of="ReplicasAdmitted", within_s=UP_S)
        requests.wait_for_responses(1, within_s=60)
    assert _containers(cluster, smollm2) == before
    assert cluster.until_ready(smollm2, "smollm2")["status"]["replicas"]["summary"] == "1/1"
