"""Start and end of an operator: its waits and log lines, the release of the Lease, its probes."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_testing.control_plane import ADMIN, CRDS, ControlPlane, control_plane, missing_tools
from octavo_testing.operator_namespace import OperatorNamespace
from octavo_testing.waiting import eventually

STATUS = "inferenceservices/status"
CRD_PATH = f"{CRDS}/inferenceservices.serving.octavo.dev"


def _probe(operated: OperatorNamespace, path: str) -> int:
    """Status of a probe; 0 without a connection."""
    try:
        with urllib.request.urlopen(operated.operator.probe_url.replace("/healthz", path), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane without the CRD of InferenceServices."""
    if missing := missing_tools():
        pytest.skip(missing)
    with control_plane(tmp_path) as plane:
        plane.call("DELETE", CRD_PATH)
        eventually(lambda: not plane.is_answering(CRD_PATH))
        yield plane


def test_the_operator_waits_for_a_missing_crd(bare: ControlPlane, tmp_path: Path) -> None:
    with OperatorNamespace(bare, "default", tmp_path, user=ADMIN) as operated:
        operated.wait_for_log("the CRD inferenceservices.serving.octavo.dev is not installed")
        assert (_probe(operated, "/healthz"), _probe(operated, "/readyz")) == (200, 503)
        bare.install_crd()
        operated.create("served")
        operated.wait_until_settled("served")
        assert (_probe(operated, "/healthz"), _probe(operated, "/readyz")) == (200, 200)


def test_the_log_names_a_missing_right(plane: ControlPlane, plane_namespace: str, tmp_path: Path) -> None:
    rules = [
        {"apiGroups": ["serving.octavo.dev"], "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["services", "secrets"], "verbs": ["*"]},
    ]
    user = plane.create_account(plane_namespace, "weak", rules)
    with OperatorNamespace(plane, plane_namespace, tmp_path, user=user) as operated:
        operated.wait_for_log(
            f'cannot list resource "serviceaccounts" in API group "" in the namespace "{plane_namespace}"'
        )
        assert (_probe(operated, "/healthz"), _probe(operated, "/readyz")) == (200, 503)


def test_the_operator_works_without_optional_kinds(plane: ControlPlane, plane_namespace: str, tmp_path: Path) -> None:
    operated = OperatorNamespace(plane, plane_namespace, tmp_path, pod_monitors=True, gateway_api=True)
    with operated:
        operated.wait_for_log("there are no PodMonitors in this cluster")
        operated.wait_for_log("there are no HTTPRoutes in this cluster")
        operated.create("served")
        operated.wait_until_settled("served")


def test_a_stopped_operator_releases_the_lease_at_once(
    plane: ControlPlane, plane_namespace: str, tmp_path: Path
) -> None:
    first = OperatorNamespace(plane, plane_namespace, tmp_path)
    second = OperatorNamespace(plane, plane_namespace, tmp_path, user=first.user, identity="two")
    with first:
        eventually(lambda: first.lease_holder() == "one", describe=first.operator.log_tail)
        with second:
            eventually(lambda: _probe(second, "/readyz") == 200, describe=second.operator.log_tail)
            since = plane.audit.mark()
            assert first.operator.stop() == 0
            assert first.lease_holder() != "one"
            second.create("served")
            second.wait_until_settled("served")
            assert not [
                count for (kind, _), count in second.writes(since).items() if count > 1 and "status" not in kind
            ]


def test_two_operators_that_start_together_share_one_key(
    plane: ControlPlane, plane_namespace: str, tmp_path: Path
) -> None:
    first = OperatorNamespace(plane, plane_namespace, tmp_path, key_secret="octavo-key")
    second = OperatorNamespace(
        plane, plane_namespace, tmp_path, user=first.user, identity="two", key_secret="octavo-key"
    )
    with first, second:
        for each in (first, second):
            eventually(lambda each=each: _probe(each, "/readyz") == 200, describe=each.operator.log_tail)
        secrets = plane.call("GET", f"/api/v1/namespaces/{plane_namespace}/secrets")["items"]
        assert [secret["metadata"]["name"] for secret in secrets] == ["octavo-key"]
        first.operator.assert_running()
        second.operator.assert_running()


def test_the_next_leader_restores_a_deleted_key(plane: ControlPlane, plane_namespace: str, tmp_path: Path) -> None:
    secret = f"/api/v1/namespaces/{plane_namespace}/secrets/octavo-key"
    first = OperatorNamespace(plane, plane_namespace, tmp_path, key_secret="octavo-key")
    second = OperatorNamespace(
        plane, plane_namespace, tmp_path, user=first.user, identity="two", key_secret="octavo-key"
    )
    with first:
        eventually(lambda: first.lease_holder() == "one", describe=first.operator.log_tail)
        with second:
            eventually(lambda: _probe(second, "/readyz") == 200, describe=second.operator.log_tail)
            key = plane.call("GET", secret)["data"]
            plane.call("DELETE", secret)
            assert first.operator.stop() == 0
            eventually(lambda: plane.is_answering(secret), describe=second.operator.log_tail)
            assert plane.call("GET", secret)["data"] == key
