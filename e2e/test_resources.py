"""Resources of a replica: a GPU, and at most one CPU and one GiB for the small model."""

import pytest
from octavo_e2e.cluster import SMALL, Cluster, Step, condition, exposed

HOST, NAME = "bounded.example.test", "bounded"
GPU = "nvidia.com/gpu"
LIMITS = {"cpu": "1", "memory": "1Gi"}
PEAK = """
from pathlib import Path
places = ("/sys/fs/cgroup/memory.peak", "/sys/fs/cgroup/memory/memory.max_usage_in_bytes")
print(next(path.read_text() for path in map(Path, places) if path.exists()))
"""


@pytest.fixture(scope="module")
def bounded(cluster: Cluster, namespace: str) -> str:
    """The namespace of the service `bounded`. It computes on the CPU of a node with a GPU."""
    if not any(int(node["status"]["allocatable"].get(GPU, 0)) for node in cluster.find("Node", None)):
        pytest.skip(f"no node of this cluster has {GPU}")
    resources = SMALL["resources"] | {"limits": LIMITS | {GPU: 1}}
    cluster.serve(namespace, NAME, **exposed(HOST), resources=resources, engine=SMALL["engine"] | {"device": "cpu"})
    cluster.until_ready(namespace, NAME)
    return namespace


def _engine(cluster: Cluster, namespace: str) -> dict:
    label = f"app.kubernetes.io/component=engine,serving.octavo.dev/service={NAME}"
    (pod,) = cluster.find("Pod", namespace, label)
    return pod


def test_a_pod_that_asks_for_a_gpu_gets_a_node_that_has_one(bounded: str, cluster: Cluster) -> None:
    pod = _engine(cluster, bounded)
    node = cluster.get("Node", "", pod["spec"]["nodeName"])
    assert node is not None
    assert int(node["status"]["allocatable"][GPU]) > 0
    assert pod["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["spec"]["volumes"]
    assert "Paris" in cluster.ask(HOST, NAME)


def test_a_pod_without_a_usable_gpu_says_why(bounded: str, cluster: Cluster) -> None:
    cluster.serve(bounded, "on-gpu", resources={"limits": {GPU: 1}})
    found = cluster.until_reason(bounded, "on-gpu", "NoGpuSupport")
    message = condition(found, "Ready")["message"]
    assert "--device cuda" in message
    assert "without CUDA" in message
    cluster.kubectl("delete", "infsvc", "on-gpu", "-n", bounded)


def test_a_request_for_too_many_gpus_is_unschedulable(bounded: str, cluster: Cluster) -> None:
    cluster.serve(bounded, "greedy", resources={"limits": {GPU: 64}}, engine={"device": "cpu"})
    found = cluster.until_reason(bounded, "greedy", "Unschedulable", within_s=30)
    assert f"Insufficient {GPU}" in condition(found, "Ready")["message"]
    cluster.kubectl("delete", "infsvc", "greedy", "-n", bounded)


def test_the_small_model_runs_within_one_cpu_and_one_gib(bounded: str, cluster: Cluster, step: Step) -> None:
    with step("an answer by one CPU"):
        assert "Paris" in cluster.ask(HOST, NAME)
    pod = _engine(cluster, bounded)
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert limits == LIMITS | {GPU: "1"}
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    peak = int(cluster.kubectl("exec", "-n", bounded, pod["metadata"]["name"], "--", "python", "-c", PEAK))
    print(f"peak of the engine's memory: {peak / 2**20:.0f} MiB")
    assert peak <= 2**30
