"""No request fails while a service is rolled out, scaled and reverted, and while operators die: with streams that are
longer than the grace period of pods."""

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
from octavo_e2e.cluster import SMALL, SYSTEM, Cluster, Raw, Step, condition, exposed, is_ready
from octavo_e2e.release import SELECTOR, Release
from octavo_e2e.stream_driver import StreamDriver

pytestmark = [pytest.mark.timeout(900, func_only=True)]

HOST, NAME = "rolled.example.test", "rolled"
ENGINES = f"serving.octavo.dev/service={NAME},app.kubernetes.io/component=engine"
REVISION = "serving.octavo.dev/revision"
GRACE_S = 20  # the drain and the shutdown
DRAIN = {"timeoutSeconds": 5}
ROLLED_S = 400


@pytest.fixture(scope="module")
def rolled(cluster: Cluster, namespace: str, release: Release) -> Iterator[str]:
    """The namespace of a service with two replicas, whose pods have a short grace period."""
    release.upgrade("--set", "operator.lameDuckSeconds=5")
    release.until_up()
    _apply(cluster, namespace)
    cluster.until_ready(namespace, NAME)
    yield namespace
    cluster.kubectl("delete", "infsvc", NAME, "-n", namespace)
    release.upgrade("--reset-values")
    release.until_up()


@pytest.fixture
def streams(rolled: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Iterator[StreamDriver]:
    """Sends requests throughout the test; afterwards none has failed."""
    with StreamDriver(cluster, HOST, NAME, cluster.direct_url(rolled, NAME), 1.3 * GRACE_S) as driver:
        yield driver
    with capsys.disabled():
        print(f"\n  no failed request: {driver}")


def test_a_rollout_and_its_revert_lose_no_request(
    streams: StreamDriver, rolled: str, cluster: Cluster, step: Step
) -> None:
    first, since = _revision(cluster, rolled), _ready_since(cluster, rolled)
    with step("roll two replicas out under streams"):
        _apply(cluster, rolled, maxNumSeqs=31)
        _until_rolled_out(cluster, rolled)
    second = _revision(cluster, rolled)
    assert second != first
    with step("revert in mid-rollout"):
        _apply(cluster, rolled, maxNumSeqs=30)
        cluster.until("Pod", rolled, lambda pods: len(_revisions(pods)) == 2, label=ENGINES, within_s=60)
        _apply(cluster, rolled, maxNumSeqs=31)
        _until_rolled_out(cluster, rolled)
    assert _revision(cluster, rolled) == second
    assert _ready_since(cluster, rolled) == since


def test_operators_that_die_in_mid_rollout_lose_no_request(
    streams: StreamDriver, rolled: str, cluster: Cluster, step: Step
) -> None:
    with step("roll out while operators die"):
        _apply(cluster, rolled, maxNumSeqs=29)
        for count in (1, 2):
            _until_started(cluster, rolled, count, max_num_seqs=29)
            cluster.kubectl("delete", "pod", "-n", SYSTEM, "-l", SELECTOR, "--force", "--grace-period=0")
        _until_rolled_out(cluster, rolled)


@pytest.mark.long
def test_three_quick_edits_lose_no_request(streams: StreamDriver, rolled: str, cluster: Cluster, step: Step) -> None:
    with step("edit three times, a second apart"):
        for number in (28, 27, 26):
            _apply(cluster, rolled, maxNumSeqs=number)
            Event().wait(1)
        _until_started(cluster, rolled, 2, max_num_seqs=26)
        _until_rolled_out(cluster, rolled)


@pytest.mark.long
def test_scaling_loses_no_request(streams: StreamDriver, rolled: str, cluster: Cluster, step: Step) -> None:
    with step("scale to three replicas and to one, under streams"):
        for replicas in (3, 1, 2):
            cluster.kubectl("scale", "infsvc", NAME, "-n", rolled, f"--replicas={replicas}")
            _until_rolled_out(cluster, rolled, replicas)


def _apply(cluster: Cluster, namespace: str, **engine: Any) -> None:
    cluster.serve(namespace, NAME, **exposed(HOST), engine=SMALL["engine"] | engine, drain=DRAIN, replicas=2)


def _until_rolled_out(cluster: Cluster, namespace: str, replicas: int = 2) -> None:
    """Wait until the service is ready and has no other pods than those that it needs."""
    cluster.until_one("InferenceService", namespace, NAME, is_ready, within_s=ROLLED_S)

    def is_alone(pods: list[Raw]) -> bool:
        return len(pods) == replicas and len(_revisions(pods)) <= 1

    cluster.until("Pod", namespace, is_alone, label=ENGINES, within_s=ROLLED_S, what="one revision")
    cluster.until_one("InferenceService", namespace, NAME, is_ready, within_s=ROLLED_S)


def _revision(cluster: Cluster, namespace: str) -> str:
    found: str = cluster.get("InferenceService", namespace, NAME)["status"]["revision"]["current"]
    return found


def _ready_since(cluster: Cluster, namespace: str) -> str:
    found: str = condition(cluster.get("InferenceService", namespace, NAME), "Ready")["lastTransitionTime"]
    return found


def _revisions(pods: list[Raw]) -> set[str]:
    return {pod["metadata"]["labels"][REVISION] for pod in pods}


def _until_started(cluster: Cluster, namespace: str, count: int, *, max_num_seqs: int) -> None:
    flag = f"--max-num-seqs={max_num_seqs}"

    def have_started(pods: list[Raw]) -> bool:
        return sum(flag in str(pod["spec"]["containers"][0]["args"]) for pod in pods) >= count

    cluster.until("Pod", namespace, have_started, label=ENGINES, within_s=ROLLED_S, what=f"{count} with {flag}")
