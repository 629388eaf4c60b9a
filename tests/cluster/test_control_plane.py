"""The control plane of other tests: it stores objects, logs the calls of each account, and survives a kill."""

import time
import urllib.error

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from octavo_testing.control_plane import LIMIT_S, ControlPlane
from octavo_testing.infsvc_cases import Case

SERVICES = "/apis/serving.octavo.dev/v1alpha1/namespaces/{}/inferenceservices"


def test_stored_objects_survive_the_api_server(plane: ControlPlane, plane_namespace: str) -> None:
    path = SERVICES.format(plane_namespace)
    made = plane.call("POST", path, Case("", {}, name="kept").manifest())
    with plane.apiserver_down(), pytest.raises(urllib.error.URLError):
        plane.call("GET", path)
    assert plane.call("GET", f"{path}/kept")["metadata"]["uid"] == made["metadata"]["uid"]


def test_the_audit_log_shows_calls_of_a_limited_account(plane: ControlPlane, plane_namespace: str) -> None:
    rules = [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}]
    user = plane.create_account(plane_namespace, "reader", rules)
    since = plane.audit.mark()
    with config.new_client_from_config(str(plane.kubeconfig(user))) as connected:
        core = client.CoreV1Api(connected)
        assert core.list_namespaced_secret(plane_namespace).items == []
        with pytest.raises(ApiException, match="Forbidden"):
            core.list_namespaced_pod(plane_namespace)
    calls = plane.audit.calls(since=since, user=user)
    assert [(call.verb, call.resource, call.namespace, call.code) for call in calls] == [
        ("list", "secrets", plane_namespace, 200),
        ("list", "pods", plane_namespace, 403),
    ]


def test_a_watch_of_a_compacted_history_fails(plane: ControlPlane, plane_namespace: str) -> None:
    path = f"/api/v1/namespaces/{plane_namespace}/configmaps"
    before = plane.call("POST", path, {"metadata": {"name": "before"}})["metadata"]["resourceVersion"]
    plane.call("POST", path, {"metadata": {"name": "after"}})
    plane.compact()
    with plane.apiserver_down():
        pass  # the API server's watch cache is lost
    watched = plane.call("GET", f"{path}?watch=1&resourceVersion={before}&timeoutSeconds=1")
    assert (watched["type"], watched["object"]["code"]) == ("ERROR", 410)


def test_children_are_deleted_with_their_owner(plane: ControlPlane, plane_namespace: str) -> None:
    path = f"/api/v1/namespaces/{plane_namespace}/configmaps"
    owner = plane.call("POST", path, {"metadata": {"name": "owner"}})["metadata"]
    ref = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["uid"]}
    plane.call("POST", path, {"metadata": {"name": "child", "ownerReferences": [ref]}})
    plane.call("DELETE", f"{path}/owner")
    deadline = time.monotonic() + LIMIT_S
    while [found["metadata"]["name"] for found in plane.call("GET", path)["items"]]:
        assert time.monotonic() < deadline
