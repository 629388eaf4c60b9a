"""Services and namespaces are deleted with all their objects within a minute, with or without an operator."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from octavo_e2e.cluster import CHILDREN, SYSTEM, Cluster, condition, exposed
from octavo_e2e.release import SELECTOR, Release

WITHIN_S = 60
SERVICE = "going"
METRICS_API = "octavo-metrics-api"
LABEL = f"serving.octavo.dev/service={SERVICE}"


@pytest.fixture(scope="module")
def places(cluster: Cluster, make_namespace: Callable[[], str]) -> list[str]:
    """Four namespaces with one service each; the last service has routers only, the others are ready."""
    made = [make_namespace() for _ in range(4)]
    for number, namespace in enumerate(made):
        replicas, more = (0, {"drain": {"timeoutSeconds": 10}}) if namespace == made[-1] else (1, {})
        cluster.serve(namespace, SERVICE, **exposed(f"going-{number}.example.test"), replicas=replicas, **more)
    for namespace in made[:-1]:
        cluster.until_ready(namespace, SERVICE, within_s=240)
    cluster.until_reason(made[-1], SERVICE, "NoReplicas", of="ReplicasAdmitted")
    return made


def _delete_and_wait(cluster: Cluster, of_service: str, whole: str) -> None:
    """Delete a service in one namespace and the whole other namespace at the same time."""
    kinds = [kind for kind in CHILDREN if cluster.find(kind, of_service, LABEL)]
    assert set(kinds) == set(CHILDREN)
    cluster.kubectl("delete", "infsvc", SERVICE, "-n", of_service)
    cluster.kubectl("delete", "namespace", whole, "--wait=false")
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(cluster.until_gone, of_service, *kinds, label=LABEL, within_s=WITHIN_S),
            pool.submit(cluster.until_no_namespace, whole, within_s=WITHIN_S),
        ]
        for one in both:
            one.result()


def test_a_service_and_a_namespace_are_deleted_within_a_minute(places: list[str], cluster: Cluster) -> None:
    _delete_and_wait(cluster, places[0], places[1])


@pytest.fixture
def hanging_server(release: Release, cluster: Cluster) -> Iterator[None]:
    """A pod behind the Service of the metrics API, beside the operators, that accepts connections and is silent."""
    (service,) = (s for s in cluster.find("Service", SYSTEM) if s["metadata"]["name"] == METRICS_API)
    (operator, *_) = cluster.find("Pod", SYSTEM, SELECTOR)
    code = "import socket, time; s = socket.create_server(('', 8443)); time.sleep(3600)"
    container = {
        "name": "silent",
        "image": operator["spec"]["containers"][0]["image"],
        "command": ["python", "-c", code],
        "ports": [{"name": "metrics-api", "containerPort": 8443}],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "silent", "labels": service["spec"]["selector"]},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }
    cluster.apply(pod, SYSTEM)
    try:
        cluster.until_one(
            "Pod", SYSTEM, "silent", lambda pod: condition(pod, "Ready").get("status") == "True", within_s=60
        )
        yield
    finally:
        cluster.kubectl("delete", "pod", "silent", "-n", SYSTEM)


def test_a_namespace_is_deleted_beside_a_metrics_server_that_does_not_answer(
    release: Release, cluster: Cluster, make_namespace: Callable[[], str], hanging_server: None
) -> None:
    for _ in range(3):  # the API server chooses one of the metrics servers each time
        namespace = make_namespace()
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
        cluster.until_no_namespace(namespace, within_s=WITHIN_S)


def test_deletion_works_without_an_operator(places: list[str], cluster: Cluster, release: Release) -> None:
    release.scale(0)
    try:
        _delete_and_wait(cluster, places[2], places[3])
    finally:
        release.scale(2)
