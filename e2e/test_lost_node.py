"""The kubelet is killed: the service does not count pods whose node reports nothing, and says why."""

from collections.abc import Iterator
from functools import partial

import pytest
from octavo_e2e.cluster import Cluster, Raw, Step, condition, eventually, exposed
from octavo_e2e.providers import Provider
from openai import OpenAIError

pytestmark = [pytest.mark.last, pytest.mark.timeout(480, func_only=True)]

HOST, NAME = "lost.example.test", "lost"
ENGINES = f"app.kubernetes.io/component=engine,serving.octavo.dev/service={NAME}"
GIVEN_UP_S = 120  # Kubernetes gives a node up after 50 s without a report
SEEN_S, BACK_S = 5, 120


@pytest.fixture
def lost(cluster: Cluster, namespace: str, provider: Provider, step: Step) -> Iterator[str]:
    """The namespace of a service whose node has just lost its kubelet."""
    if provider.tools is None:
        pytest.skip(f"only ../shared/k8s can kill its kubelet, this cluster is {provider.name}")
    cluster.serve(namespace, NAME, **exposed(HOST))
    cluster.until_ready(namespace, NAME)
    provider.run(str(provider.tools / "kill"), "kubelet")
    yield namespace
    with step("restart the kubelet"):
        provider.run(str(provider.tools / "restart"), "kubelet")


def test_pods_of_a_lost_node_do_not_serve(lost: str, cluster: Cluster, provider: Provider, step: Step) -> None:
    with step("Kubernetes marks the pods of the lost node"):
        cluster.until("Pod", lost, lambda pods: any(map(_is_marked, pods)), label=ENGINES, within_s=GIVEN_UP_S)
    with step("the service sees it"):
        service = cluster.until_one("InferenceService", lost, NAME, _has_none, within_s=SEEN_S, what="no ready replica")
    workload = condition(service, "WorkloadReady")
    assert (workload["status"], workload["reason"]) == ("False", "NodeLost")
    assert f"{NAME}-engine-" in workload["message"]
    assert condition(service, "Ready")["reason"] == "NodeLost"
    provider.run(str(provider.tools / "restart"), "kubelet")
    back = cluster.until_ready(lost, NAME, within_s=BACK_S)
    assert back["status"]["replicas"]["summary"] == "1/1"
    ask = partial(cluster.ask, HOST, NAME)  # the ingress controller was on the lost node, too
    assert "Paris" in eventually(ask, within_s=BACK_S, errors=(OpenAIError,))


def _is_marked(pod: Raw) -> bool:
    return condition(pod, "Ready").get("status") == "False"


def _has_none(service: Raw) -> bool:
    return service["status"]["replicas"]["ready"] == 0
