"""Rollouts where all GPUs are taken: in place, and given up if the new revision can't start."""

from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
from octavo_e2e.background_client import BackgroundClient
from octavo_e2e.cluster import SMALL, Cluster, Raw, condition, is_ready

HOST, NAME = "full.example.test", "full"
ENGINES = f"serving.octavo.dev/service={NAME},app.kubernetes.io/component=engine"
REVISION = "serving.octavo.dev/revision"
ROLLED_S, PATIENCE_S, DEADLINE_S = 240, 10, 45

pytestmark = pytest.mark.timeout(600, func_only=True)


@pytest.fixture(scope="module")
def full(cluster: Cluster, namespace: str) -> Iterator[str]:
    """The namespace of a service whose two replicas have all GPUs of the cluster."""
    nodes = cluster.find("Node", None)
    gpus = sum(int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) for node in nodes)
    if gpus != 2:
        pytest.skip(f"the cluster has {gpus} GPUs, and this test needs 2")
    _apply(cluster, namespace)
    cluster.until_ready(namespace, NAME)
    yield namespace
    cluster.kubectl("delete", "infsvc", NAME, "-n", namespace)


class Watcher:
    """Watches the pods of the service: the least number that served, and those that asked for a third GPU."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace, self._ended = cluster, namespace, Event()
        self.least, self.third = 2, set[str]()
        self._thread = Thread(target=self._watch)

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._cluster.kubectl("annotate", "pods", "-n", self._namespace, "-l", ENGINES, "watched=true")  # a last event
        self._thread.join()

    def _watch(self) -> None:
        self._cluster.until("Pod", self._namespace, self._note, label=ENGINES, within_s=600, what="the end")

    def _note(self, pods: list[Raw]) -> bool:
        self.least = min(self.least, sum(condition(pod, "Ready").get("status") == "True" for pod in pods))
        have_gpus = [
            pod for pod in pods if "nodeName" in pod["spec"] and pod["status"]["phase"] in ("Pending", "Running")
        ]
        if len(have_gpus) == 2:
            self.third |= {pod["metadata"]["name"] for pod in pods if "nodeName" not in pod["spec"]}
        return self._ended.is_set()


def test_a_rollout_goes_in_place(full: str, cluster: Cluster) -> None:
    first = _revision(cluster, full)
    with BackgroundClient(cluster, HOST, full, NAME) as requests, Watcher(cluster, full) as watcher:
        requests.wait_for_responses(2, within_s=60)
        _apply(cluster, full, maxNumSeqs=31)
        _until_rolled_out(cluster, full)
        requests.wait_for_responses(2, within_s=60)
    assert _revision(cluster, full) != first
    assert (watcher.least, len(watcher.third)) == (1, 1)


def test_a_revision_that_does_not_start_is_given_up(full: str, cluster: Cluster) -> None:
    first = _revision(cluster, full)
    with BackgroundClient(cluster, HOST, full, NAME) as requests:
        _apply(cluster, full, extraArgs=["--no-such-flag"])
        cluster.until_reason(full, NAME, "DeadlineExceeded", of="Progressing", within_s=ROLLED_S)
        cluster.until("Pod", full, lambda pods: _serving(pods) == {first: 2}, label=ENGINES, within_s=ROLLED_S)
        requests.wait_for_responses(2, within_s=60)
        _apply(cluster, full, maxNumSeqs=31)
        _until_rolled_out(cluster, full)
    assert _revision(cluster, full) == first


def _apply(cluster: Cluster, namespace: str, **engine: Any) -> None:
    resources: dict[str, Any] = SMALL["resources"]
    gpu = {"nvidia.com/gpu": "1"}
    cluster.serve(
        namespace,
        NAME,
        replicas=2,
        engine=SMALL["engine"] | {"device": "cpu"} | engine,
        resources={"requests": resources["requests"] | gpu, "limits": resources["limits"] | gpu},
        rollout={"surgePatienceSeconds": PATIENCE_S, "progressDeadlineSeconds": DEADLINE_S},
        exposure={"ingress": {"host": HOST}},
        auth={"required": False},
    )


def _until_rolled_out(cluster: Cluster, namespace: str) -> None:
    cluster.until_one("InferenceService", namespace, NAME, is_ready, within_s=ROLLED_S)
    cluster.until("Pod", namespace, lambda pods: list(_serving(pods).values()) == [2] == [len(pods)], label=ENGINES,
                  within_s=ROLLED_S, what="one revision")  # fmt: skip
    cluster.until_one("InferenceService", namespace, NAME, is_ready, within_s=ROLLED_S)


def _serving(pods: list[Raw]) -> dict[str, int]:
    """Number of pods that serve by revision."""
    ready = [pod["metadata"]["labels"][REVISION] for pod in pods if condition(pod, "Ready").get("status") == "True"]
    return {revision: ready.count(revision) for revision in ready}


def _revision(cluster: Cluster, namespace: str) -> str:
    found: str = cluster.get("InferenceService", namespace, NAME)["status"]["revision"]["current"]
    return found
