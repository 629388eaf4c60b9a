"""The chart is upgraded, uninstalled and installed again while a service runs, and no request fails."""

from collections.abc import Callable, Iterator

import pytest
from octavo_e2e.background_client import BackgroundClient
from octavo_e2e.cluster import SYSTEM, Cluster, Raw, Step, is_ready, revision
from octavo_e2e.release import SELECTOR, Release

pytestmark = pytest.mark.last

HOST = "smollm2.example.test"
PODS = "serving.octavo.dev/service=smollm2"
ENGINE = f"{PODS},app.kubernetes.io/component=engine"
ROUTER = f"{PODS},app.kubernetes.io/component=router"
NAME = "smollm2"


@pytest.fixture
def requests(smollm2: str, cluster: Cluster) -> Iterator[BackgroundClient]:
    """Sends requests throughout the test; afterwards none has failed."""
    cluster.until_ready(smollm2, NAME)
    with BackgroundClient(cluster, HOST, smollm2, NAME) as client:
        client.wait_for_responses(2, within_s=60)
        yield client
        client.wait_for_responses(2, within_s=60)


def test_helm_test_succeeds_and_removes_its_objects(release: Release, cluster: Cluster) -> None:
    release.until_up()
    said = cluster.helm("test", "octavo", "-n", SYSTEM)
    assert "Phase:          Succeeded" in said
    left = [o["metadata"]["name"] for kind in ("Pod", "Role", "ServiceAccount") for o in cluster.find(kind, SYSTEM)]
    assert [name for name in left if "-test" in name] == []


def test_an_upgrade_without_engine_changes_restarts_no_pods(
    requests: BackgroundClient, smollm2: str, cluster: Cluster, release: Release, step: Step
) -> None:
    before = _uids(cluster, smollm2, PODS)
    with step("helm upgrade, nothing new for engines"):
        release.upgrade("--set", "operator.workers=8")
        _until_new_leader(cluster, release, smollm2)
    assert _uids(cluster, smollm2, PODS) == before
    release.upgrade("--reset-values")


def test_a_setting_of_all_pods_rolls_engines_and_routers(
    requests: BackgroundClient, smollm2: str, cluster: Cluster, release: Release, step: Step
) -> None:
    first, routers = revision(cluster.until_ready(smollm2, NAME)), _uids(cluster, smollm2, ROUTER)
    with step("helm upgrade, another value for all pods"):
        release.upgrade("--set", "operator.lameDuckSeconds=10")
        cluster.until_one("InferenceService", smollm2, NAME, _serves_another_than(first), within_s=240)
        _until_one_revision(cluster, smollm2)
    assert routers.isdisjoint(_uids(cluster, smollm2, ROUTER))
    release.upgrade("--reset-values")
    cluster.until_one("InferenceService", smollm2, NAME, lambda o: is_ready(o) and revision(o) == first, within_s=240)
    _until_one_revision(cluster, smollm2)


def test_services_run_without_the_operator_until_it_is_reinstalled(
    requests: BackgroundClient, smollm2: str, cluster: Cluster, release: Release, step: Step, namespace: str
) -> None:
    before, uid = _uids(cluster, smollm2, PODS), cluster.until_ready(smollm2, NAME)["metadata"]["uid"]
    with step("helm uninstall, and install again"):
        release.uninstall()
        assert cluster.find("Deployment", SYSTEM) == []
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
        cluster.until_no_namespace(namespace, within_s=60)
        requests.wait_for_responses(3, within_s=90)
        release.install()
        _until_new_leader(cluster, release, smollm2)
    assert _uids(cluster, smollm2, PODS) == before
    assert cluster.until_ready(smollm2, NAME)["metadata"]["uid"] == uid


def _uids(cluster: Cluster, namespace: str, label: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.find("Pod", namespace, label)}


def _serves_another_than(old: str) -> Callable[[Raw], bool]:
    return lambda service: is_ready(service) and revision(service) != old


def _until_one_revision(cluster: Cluster, namespace: str) -> None:
    cluster.until("Pod", namespace, lambda pods: len(pods) == 1, label=ENGINE, within_s=150, what="one engine")


def _until_new_leader(cluster: Cluster, release: Release, namespace: str) -> None:
    """Wait until a current pod leads and has a complete view: it must settle a new service."""
    release.until_up()

    def is_led(lease: Raw) -> bool:
        holders = {pod["metadata"]["name"] for pod in cluster.find("Pod", SYSTEM, SELECTOR) if _stays(pod)}
        return lease["spec"]["holderIdentity"] in holders

    cluster.until_one("Lease", SYSTEM, "octavo-operator", is_led, within_s=60, what="an operator that leads")
    cluster.serve(namespace, "marker", replicas=0)
    cluster.until_reason(namespace, "marker", "NoReplicas", of="ReplicasAdmitted")
    cluster.kubectl("delete", "infsvc", "marker", "-n", namespace)


def _stays(pod: Raw) -> bool:
    return "deletionTimestamp" not in pod["metadata"]
