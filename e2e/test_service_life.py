"""One service from `kubectl apply` to its deletion: `make smoke` runs this file alone.

The deadlines only bound a hanging test: they do not measure the speed of the machine.
"""

import pytest
from httpx2 import HTTPError
from octavo_e2e.cluster import CHILDREN, EXAMPLE, Cluster, Raw, Step, eventually, is_ready, revision
from openai import OpenAIError

pytestmark = [pytest.mark.last, pytest.mark.timeout(3600, func_only=True)]

HOST, NAME = "smollm2.example.test", "smollm2"
SERVICE_LABEL = f"serving.octavo.dev/service={NAME}"
ENGINES = f"{SERVICE_LABEL},app.kubernetes.io/component=engine"
WITHIN_S = 900
EDIT = '{"spec": {"engine": {"maxNumSeqs": 7}}}'


def _assert_answers(cluster: Cluster) -> None:
    """Ask through the Ingress. Its controller applies new addresses with a delay, so early requests may fail."""
    text = eventually(lambda: cluster.ask(HOST, NAME), within_s=WITHIN_S, errors=(OpenAIError, HTTPError))
    assert "Paris" in text


def _until_two_ready(cluster: Cluster, namespace: str, *, other_than: str = "") -> str:
    """Wait until two replicas are ready, of another revision than this one. Returns their revision."""

    def holds(service: Raw) -> bool:
        status = service.get("status", {})
        return is_ready(service) and status["replicas"]["summary"] == "2/2" and revision(service) != other_than

    return revision(cluster.until_one("InferenceService", namespace, NAME, holds, within_s=WITHIN_S))


def test_a_service_is_applied_scaled_edited_and_deleted(smollm2: str, cluster: Cluster, step: Step) -> None:
    with step('"Paris", streamed through the Ingress'):
        _assert_answers(cluster)
    with step("kubectl scale infsvc smollm2 --replicas=2"):
        cluster.kubectl("scale", "infsvc", NAME, "-n", smollm2, "--replicas=2")
        first = _until_two_ready(cluster, smollm2)
    with step("kubectl patch infsvc smollm2: another revision replaces the first one"):
        cluster.kubectl("patch", "infsvc", NAME, "-n", smollm2, "--type=merge", "-p", EDIT)
        _until_two_ready(cluster, smollm2, other_than=first)
        old = f"serving.octavo.dev/revision={first}"
        cluster.until_gone(smollm2, "Deployment", "Pod", label=old, within_s=WITHIN_S)
    pods = cluster.find("Pod", smollm2, ENGINES)
    assert ["--max-num-seqs=7" in pod["spec"]["containers"][0]["args"] for pod in pods] == [True, True]
    with step("a response of the new revision"):
        _assert_answers(cluster)
    with step("kubectl delete infsvc smollm2"):
        assert [kind for kind in CHILDREN if not cluster.find(kind, smollm2, SERVICE_LABEL)] == []
        cluster.kubectl("delete", "infsvc", NAME, "-n", smollm2, within_s=WITHIN_S)
        cluster.until_gone(smollm2, *CHILDREN, label=SERVICE_LABEL, within_s=WITHIN_S)
    cluster.apply(EXAMPLE, smollm2)  # other tests of the suite use it
