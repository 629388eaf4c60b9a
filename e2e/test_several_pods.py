"""`spec.parallelism.nodes`: a replica has several pods, as a LeaderWorkerSet. No request fails while it is scaled and
rolled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from octavo_e2e.cluster import SMALL, Cluster, Raw, Step, condition, exposed, is_ready
from octavo_e2e.stream_driver import StreamDriver

pytestmark = [pytest.mark.timeout(1200, func_only=True)]

HOST, NAME = "grouped.example.test", "grouped"
OF_SERVICE = f"serving.octavo.dev/service={NAME},app.kubernetes.io/component"
LEADERS, WORKERS = f"{OF_SERVICE}=engine", f"{OF_SERVICE}=engine-worker"
REVISION, GROUP = "serving.octavo.dev/revision", "leaderworkerset.sigs.k8s.io/group-index"
CONTROLLER = ("lws-system", "lws-controller-manager")
CRD = "leaderworkersets.leaderworkerset.x-k8s.io"
MEMORY: Raw = {"requests": {"cpu": "50m", "memory": "400Mi"}, "limits": {"memory": "1500Mi"}}
LEAST_S = 10
WITHIN_S = 600


def _serve(cluster: Cluster, namespace: str, *, replicas: int = 2, **engine: Any) -> None:
    division = {"parallelism": {"tensor": 2, "nodes": 2}, "replicas": replicas, "resources": MEMORY}
    cluster.serve(namespace, NAME, **division, **exposed(HOST), engine=SMALL["engine"] | engine)


@pytest.fixture(scope="module")
def grouped(cluster: Cluster, namespace: str) -> str:
    """The namespace of a service with two replicas of two pods."""
    if CRD not in {crd["metadata"]["name"] for crd in cluster.find("CustomResourceDefinition", None)}:
        pytest.skip("this cluster has no LeaderWorkerSet")
    _serve(cluster, namespace)
    cluster.until_ready(namespace, NAME, within_s=WITHIN_S)
    return namespace


@pytest.fixture
def streams(grouped: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Iterator[StreamDriver]:
    """Sends requests throughout the test; afterwards none has failed."""
    with StreamDriver(cluster, HOST, NAME, cluster.direct_url(grouped, NAME), LEAST_S) as driver:
        yield driver
    with capsys.disabled():
        print(f"\n  no failed request: {driver}")


def test_a_service_of_several_pods_answers_by_its_leaders(grouped: str, cluster: Cluster) -> None:
    assert "Paris" in cluster.ask(HOST, NAME, at=cluster.direct_url(grouped, NAME))
    leaders = cluster.find("Pod", grouped, LEADERS)
    workers = cluster.until("Pod", grouped, _all_ready, label=WORKERS, within_s=60, what="all ready")
    assert sorted(pod["metadata"]["labels"][GROUP] for pod in leaders) == ["0", "1"]
    assert sorted(pod["metadata"]["labels"][GROUP] for pod in workers) == ["0", "1"]
    slices = cluster.find("EndpointSlice", grouped, f"kubernetes.io/service-name={NAME}-engines")
    names = {endpoint["targetRef"]["name"] for each in slices for endpoint in each["endpoints"]}
    assert names == {pod["metadata"]["name"] for pod in leaders}


def test_scaling_and_an_edit_lose_no_request(streams: StreamDriver, grouped: str, cluster: Cluster, step: Step) -> None:
    for replicas in (1, 2):
        with step(f"scale to {replicas} replicas of two pods under streams"):
            cluster.kubectl("scale", "infsvc", NAME, "-n", grouped, f"--replicas={replicas}")
            _until_rolled_out(cluster, grouped, replicas)
            kept = cluster.find("Pod", grouped, LEADERS)
            assert {pod["metadata"]["labels"][GROUP] for pod in kept} == set(map(str, range(replicas)))
    with step("roll out two replicas of two pods under streams"):
        _serve(cluster, grouped, maxNumSeqs=31)
        _until_rolled_out(cluster, grouped, 2)


def test_the_rollout_of_a_set_itself_never_ran(grouped: str, cluster: Cluster) -> None:
    _serve(cluster, grouped, maxNumSeqs=31)
    _until_rolled_out(cluster, grouped, 2)
    (group_set,) = cluster.find("LeaderWorkerSet", grouped)
    uid = group_set["metadata"]["uid"]
    revisions = [
        each
        for each in cluster.find("ControllerRevision", grouped)
        if uid in {owner["uid"] for owner in each["metadata"]["ownerReferences"]}
    ]
    assert len(revisions) == 1


def test_a_write_that_the_sets_webhook_refuses_is_named_and_tried_again(grouped: str, cluster: Cluster) -> None:
    """The webhook answers as long as LeaderWorkerSet's controller runs."""
    _serve(cluster, grouped, maxNumSeqs=31)
    _until_rolled_out(cluster, grouped, 2)
    _scale_controller(cluster, 0)
    try:
        cluster.until_gone(CONTROLLER[0], "Pod", within_s=60)
        cluster.kubectl("scale", "infsvc", NAME, "-n", grouped, "--replicas=1")
        found = cluster.until_reason(grouped, NAME, "Refused", of="ChildrenApplied", within_s=120)
    finally:
        _scale_controller(cluster, 1)
    assert f"LeaderWorkerSet {NAME}-" in condition(found, "ChildrenApplied")["message"]
    _until_rolled_out(cluster, grouped, 1)


def test_a_worker_without_a_node_is_named(grouped: str, cluster: Cluster) -> None:
    """The leader has the only node, as all nodes of a cluster have the same operating system."""
    parts = {"key": "app.kubernetes.io/component", "operator": "In", "values": ["engine", "engine-worker"]}
    others = {"matchLabels": {"serving.octavo.dev/service": "apart"}, "matchExpressions": [parts]}
    term = {"labelSelector": others, "topologyKey": "kubernetes.io/os"}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    cluster.serve(grouped, "apart", parallelism={"tensor": 2, "nodes": 2}, resources=MEMORY, affinity=apart)
    found = cluster.until_reason(grouped, "apart", "Unschedulable", of="WorkloadReady", within_s=120)
    (worker,) = cluster.find("Pod", grouped, WORKERS.replace(NAME, "apart"))
    assert f": {worker['metadata']['name']}: " in condition(found, "WorkloadReady")["message"]
    cluster.kubectl("delete", "infsvc", "apart", "-n", grouped)


def test_a_set_whose_pods_a_quota_refuses_is_named(
    grouped: str, make_namespace: Callable[[], str], cluster: Cluster
) -> None:
    full = make_namespace()
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
    cluster.apply(quota | {"spec": {"hard": {"pods": "0"}}}, full)
    cluster.serve(full, "over", parallelism={"tensor": 2, "nodes": 2}, resources=MEMORY)
    found = cluster.until_reason(full, "over", "QuotaExceeded", of="WorkloadReady", within_s=60)
    message = condition(found, "WorkloadReady")["message"]
    assert message.startswith("2 of 2 pods can't be created: ")
    assert "exceeded quota: none" in message
    cluster.kubectl("delete", "infsvc", "over", "-n", full)


def test_all_pods_go_with_their_service(grouped: str, cluster: Cluster) -> None:
    cluster.kubectl("delete", "infsvc", NAME, "-n", grouped)
    cluster.until_gone(grouped, "LeaderWorkerSet", "StatefulSet", "Pod", within_s=WITHIN_S)


def _all_ready(pods: list[Raw]) -> bool:
    return len(pods) == 2 and all(condition(pod, "Ready").get("status") == "True" for pod in pods)


def _scale_controller(cluster: Cluster, replicas: int) -> None:
    namespace, name = CONTROLLER
    cluster.kubectl("scale", f"deployment/{name}", "-n", namespace, f"--replicas={replicas}")


def _until_rolled_out(cluster: Cluster, namespace: str, replicas: int) -> None:
    """Wait until the service is ready and has no other pods than those that it needs."""
    cluster.until_one("InferenceService", namespace, NAME, is_ready, within_s=WITHIN_S)

    def is_alone(pods: list[Raw]) -> bool:
        return len(pods) == replicas and len({pod["metadata"]["labels"][REVISION] for pod in pods}) == 1

    for label in (LEADERS, WORKERS):
        cluster.until("Pod", namespace, is_alone, label=label, within_s=WITHIN_S, what="one revision")
    cluster.until_one("InferenceService", namespace, NAME, is_ready, within_s=WITHIN_S)
