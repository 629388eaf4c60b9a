"""A service with API keys, and limits of these, in a namespace under the restricted Pod Security Standard."""

import json
import secrets
from functools import partial
from itertools import product

import pytest
from octavo_e2e.admin_paths import METHODS, NOT_FOR_CLIENTS
from octavo_e2e.cluster import Cluster, eventually
from openai import AuthenticationError, RateLimitError

HOST, NAME = "guarded.example.test", "guarded"
MOUNTED_S = 120  # by itself a kubelet updates a changed Secret or ConfigMap in its pods within about a minute


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, namespace: str) -> str:
    """The namespace of the service `guarded`."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    keys = [f"--from-literal={key}" for key in ("team-a=key-of-a", "team-c=key-of-c", "admin=key-of-admin")]
    cluster.kubectl("create", "secret", "generic", "keys", "-n", namespace, *keys)
    cluster.kubectl("create", "configmap", "limits", "-n", namespace, "--from-literal=tenants.yaml=tenants: {}")
    auth = {"apiKeysSecretRef": {"name": "keys"}, "limits": {"name": "limits"}}
    cluster.serve(namespace, NAME, exposure={"ingress": {"host": HOST}}, auth=auth)
    cluster.until_ready(namespace, NAME)
    return namespace


def _containers(cluster: Cluster, namespace: str) -> set[tuple[str, int]]:
    return {
        (pod["metadata"]["uid"], sum(s["restartCount"] for s in pod["status"]["containerStatuses"]))
        for pod in cluster.find("Pod", namespace)
    }


def _sync_pods(cluster: Cluster, namespace: str) -> None:
    """Let kubelets update the files of Secrets and ConfigMaps at once, as they do in a changed pod."""
    change = f"example.test/look={secrets.token_hex(4)}"
    cluster.kubectl("annotate", "pod", "--all", "--overwrite", "-n", namespace, change)


def test_a_service_works_in_a_restricted_namespace(guarded: str, cluster: Cluster) -> None:
    privileged = ("run", "privileged", "-n", guarded, "--image=none", "--privileged")
    cluster.kubectl(*privileged, check=False)
    assert cluster.get("Pod", guarded, "privileged") is None, "the namespace is not restricted"
    assert "Paris" in cluster.ask(HOST, NAME, key="key-of-a")


def test_a_request_without_a_valid_key_is_refused(guarded: str, cluster: Cluster) -> None:
    with pytest.raises(AuthenticationError):
        cluster.ask(HOST, NAME, key="a guess")


@pytest.mark.parametrize("key", ["key-of-a", "key-of-admin"])
def test_no_key_opens_admin_paths_through_the_ingress(guarded: str, cluster: Cluster, key: str) -> None:
    cluster.until_ready(guarded, NAME)
    headers = {"Authorization": f"Bearer {key}"}
    assert cluster.status(HOST, "/v1/models", headers=headers) == 200
    asked = list(product(METHODS, NOT_FOR_CLIENTS))
    found = {(method, path): cluster.status(HOST, path, method=method, headers=headers) for method, path in asked}
    assert found == dict.fromkeys(asked, 404)


def test_a_new_key_applies_without_a_restart(guarded: str, cluster: Cluster) -> None:
    before = _containers(cluster, guarded)
    with pytest.raises(AuthenticationError):
        cluster.ask(HOST, NAME, key="key-of-b")
    cluster.kubectl("patch", "secret", "keys", "-n", guarded, "-p", '{"stringData": {"team-b": "key-of-b"}}')
    _sync_pods(cluster, guarded)
    ask = partial(cluster.ask, HOST, NAME, key="key-of-b")
    assert "Paris" in eventually(ask, within_s=MOUNTED_S, errors=(AuthenticationError,))
    assert "Paris" in cluster.ask(HOST, NAME, key="key-of-a")
    assert _containers(cluster, guarded) == before


def test_a_new_limit_of_a_key_applies_without_a_restart(guarded: str, cluster: Cluster) -> None:
    before = _containers(cluster, guarded)
    for _ in range(2):
        assert "Paris" in cluster.ask(HOST, NAME, key="key-of-c")
    changed = {"data": {"tenants.yaml": json.dumps({"tenants": {"team-c": {"requestsPerMinute": 1}}})}}
    cluster.kubectl("patch", "configmap", "limits", "-n", guarded, "-p", json.dumps(changed))
    _sync_pods(cluster, guarded)

    def refusal() -> RateLimitError:
        with pytest.raises(RateLimitError) as refused:
            cluster.ask(HOST, NAME, key="key-of-c")
        return refused.value

    assert eventually(refusal, within_s=MOUNTED_S, errors=(pytest.fail.Exception,)).code == "rate_limit_exceeded"
    assert "Paris" in cluster.ask(HOST, NAME, key="key-of-a")
    assert _containers(cluster, guarded) == before
