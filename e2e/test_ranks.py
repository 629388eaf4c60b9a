"""`spec.parallelism.tensor`: one pod has several ranks. No request fails while a service is divided and rolled."""

from collections.abc import Iterator
from typing import Any

import pytest
from octavo_e2e.cluster import SMALL, Cluster, Raw, Step, condition, exposed, is_ready
from octavo_e2e.stream_driver import StreamDriver

pytestmark = [pytest.mark.timeout(900, func_only=True)]

HOST, NAME = "divided.example.test", "divided"
ENGINES = f"serving.octavo.dev/service={NAME},app.kubernetes.io/component=engine"
GPU = "nvidia.com/gpu"
KILLED = "rank 1 failed: its process was killed by signal 9"
FLAG = "--tensor-parallel-size=2"
MEMORY: Raw = {"requests": {"cpu": "100m", "memory": "800Mi"}, "limits": {"memory": "2Gi"}}
#: Command that prints the process ids of ranks other than the first. The pattern does not match its own text.
FIND_RANKS = "grep -l -x -z 'octavo_engine[.]process[.]rank' /proc/[0-9]*/cmdline | cut -d / -f 3"
LEAST_S = 20
WITHIN_S = 400


def _serve(cluster: Cluster, namespace: str, *, tensor: int, cpu: int = 2, **engine: Any) -> None:
    resources = MEMORY | {"limits": MEMORY["limits"] | {"cpu": cpu}}
    parts = {"parallelism": {"tensor": tensor}, "engine": SMALL["engine"] | engine, "resources": resources}
    cluster.serve(namespace, NAME, **parts, **exposed(HOST))


@pytest.fixture(scope="module")
def divided(cluster: Cluster, namespace: str) -> str:
    """The namespace of a service, whose engine has one rank at first."""
    _serve(cluster, namespace, tensor=1)
    cluster.until_ready(namespace, NAME)
    return namespace


@pytest.fixture
def streams(divided: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Iterator[StreamDriver]:
    """Sends requests throughout the test; afterwards none has failed."""
    with StreamDriver(cluster, HOST, NAME, cluster.direct_url(divided, NAME), LEAST_S) as driver:
        yield driver
    with capsys.disabled():
        print(f"\n  no failed request: {driver}")


def test_a_service_is_divided_and_rolled_without_a_failed_request(
    streams: StreamDriver, divided: str, cluster: Cluster, step: Step
) -> None:
    assert _num_ranks(cluster, divided) == 1
    for what, engine in (("from one rank to two", {}), ("with two ranks", {"maxNumSeqs": 30})):
        with step(f"roll out {what} under streams"):
            _serve(cluster, divided, tensor=2, **engine)
            pod = _until_rolled_out(cluster, divided, FLAG, *(f"--max-num-seqs={n}" for n in engine.values()))
        assert _num_ranks(cluster, divided) == 2
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
        assert "Paris" in cluster.ask(HOST, NAME, at=cluster.direct_url(divided, NAME))


def test_fewer_cores_than_ranks_are_refused_while_the_ranks_serve(divided: str, cluster: Cluster) -> None:
    _serve(cluster, divided, tensor=2)
    pod = _until_rolled_out(cluster, divided, FLAG)
    _serve(cluster, divided, tensor=2, cpu=1)
    found = cluster.until_reason(divided, NAME, "TooFewCpus", of="Accepted")
    assert "raise it to 2" in condition(found, "Ready")["message"]
    assert "Paris" in cluster.ask(HOST, NAME, at=cluster.direct_url(divided, NAME))
    _serve(cluster, divided, tensor=2)
    assert _until_rolled_out(cluster, divided, FLAG)["metadata"]["uid"] == pod["metadata"]["uid"]


def test_a_rank_that_dies_restarts_its_engine(divided: str, cluster: Cluster) -> None:
    _serve(cluster, divided, tensor=2)
    _until_rolled_out(cluster, divided, FLAG)
    _in_engine(cluster, divided, f"kill -9 $({FIND_RANKS})")

    def serves_again(pods: list[Raw]) -> bool:
        (status,) = pods[0]["status"]["containerStatuses"]
        has_restarted = status["restartCount"] == 1 and KILLED in str(status["lastState"])
        return has_restarted and condition(pods[0], "Ready")["status"] == "True"

    cluster.until("Pod", divided, serves_again, label=ENGINES, within_s=WITHIN_S, what="the restart")
    cluster.until_ready(divided, NAME)
    assert _num_ranks(cluster, divided) == 2
    assert "Paris" in cluster.ask(HOST, NAME, at=cluster.direct_url(divided, NAME))


def test_each_rank_on_a_gpu_needs_one(cluster: Cluster, namespace: str) -> None:
    """The engine's image has no CUDA, so the pod is scheduled, and its engine ends with the reason."""
    if all(int(node["status"]["allocatable"].get(GPU, 0)) < 2 for node in cluster.find("Node", None)):
        pytest.skip(f"no node of this cluster has two of {GPU}")
    parts: Raw = {"parallelism": {"tensor": 2}, "replicas": 1}
    cluster.serve(namespace, "on-gpus", **parts, resources={"limits": {GPU: 1}})
    found = cluster.until_reason(namespace, "on-gpus", "TooFewGpus")
    assert f"set {GPU} to 2" in condition(found, "Ready")["message"]
    cluster.serve(namespace, "on-gpus", **parts, resources={"limits": {GPU: 2}})
    cluster.until_reason(namespace, "on-gpus", "NoGpuSupport", within_s=120)
    cluster.kubectl("delete", "infsvc", "on-gpus", "-n", namespace)


def _until_rolled_out(cluster: Cluster, namespace: str, *flags: str) -> Raw:
    """Wait until the service is ready and has no other pod than one whose engine has these flags. Returns the pod."""
    cluster.until_one("InferenceService", namespace, NAME, is_ready, within_s=WITHIN_S)

    def is_alone(pods: list[Raw]) -> bool:
        return len(pods) == 1 and {*flags} <= {*pods[0]["spec"]["containers"][0]["args"]}

    (pod,) = cluster.until("Pod", namespace, is_alone, label=ENGINES, within_s=WITHIN_S, what=f"one with {flags}")
    return pod


def _num_ranks(cluster: Cluster, namespace: str) -> int:
    """Number of processes that compute in the engine's pod: the engine core and those of further ranks."""
    return 1 + len(_in_engine(cluster, namespace, FIND_RANKS).split())


def _in_engine(cluster: Cluster, namespace: str, command: str) -> str:
    (pod,) = cluster.find("Pod", namespace, ENGINES)
    name = pod["metadata"]["name"]
    return cluster.kubectl("exec", "-n", namespace, name, "-c", "engine", "--", "sh", "-c", command)
