"""Start and end of an operator: its waits and log lines, the release of the Lease, its probes."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_testing.control_plane import ADMIN, CRDS, ControlPlane, control_plane, missing_tools
from octavo_testing.operated import Operated
from octavo_testing.waiting import eventually

STATUS = "inferenceservices/status"
CRD_PATH = f"{CRDS}/inferenceservices.serving.octavo.dev"

pytestmark = pytest.mark.timeout(180)


def _probe(operated: Operated, path: str) -> int:
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
        eventually(lambda: not plane.answers(CRD_PATH))
        yield plane


def test_the_operator_waits_for_a_missing_crd(bare: ControlPlane, tmp_path: Path) -> None:
    with Operated(bare, "default", tmp_path, user=ADMIN) as operated:
        operated.wait_until_it_says("the CRD inferenceservices.serving.octavo.dev is not installed")
        assert (_probe(operated, "/healthz"), _probe(operated, "/readyz")) == (200, 503)
        bare.install_crd()
        operated.create("served")
        operated.settle("served")
        assert (_probe(operated, "/healthz"), _probe(operated, "/readyz")) == (200, 200)


def test_the_log_names_a_missing_right(plane: ControlPlane, plane_namespace: str, tmp_path: Path) -> None:
    rules = [
        {"apiGroups": ["serving.octavo.dev"], "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["services", "secrets"], "verbs": ["*"]},
    ]
    user = plane.account(plane_namespace, "weak", rules)
    with Operated(plane, plane_namespace, tmp_path, user=user) as operated:
        operated.wait_until_it_says(
            f'cannot list resource "serviceaccounts" in API group "" in the namespace "{plane_namespace}"'
        )
        assert (_probe(operated, "/healthz"), _probe(operated, "/readyz")) == (200, 503)


def test_the_operator_works_without_optional_kinds(plane: ControlPlane, plane_namespace: str, tmp_path: Path) -> None:
    operated = Operated(plane, plane_namespace, tmp_path, pod_monitors=True, gateway_api=True)
    with operated:
        operated.wait_until_it_says("there are no PodMonitors in this cluster")
        operated.wait_until_it_says("there are no HTTPRoutes in this cluster")
        operated.create("served")
        operated.settle("served")


def test_a_stopped_operator_releases_the_lease_at_once(
    plane: ControlPlane, plane_namespace: str, tmp_path: Path
) -> None:
    first = Operated(plane, plane_namespace, tmp_path)
    second = Operated(plane, plane_namespace, tmp_path, user=first.user, identity="two")
    with first:
        eventually(lambda: first.holder() == "one", says=first.operator.last_words)
        with second:
            eventually(lambda: _probe(second, "/readyz") == 200, says=second.operator.last_words)
            since = plane.audit.mark()
            assert first.operator.stop() == 0
            assert first.holder() != "one"
            second.create("served")
            second.settle("served")
            assert not [
                count for (kind, _), count in second.writes(since).items() if count > 1 and "status" not in kind
            ]


def test_two_operators_that_start_together_share_one_key(
    plane: ControlPlane, plane_namespace: str, tmp_path: Path
) -> None:
    first = Operated(plane, plane_namespace, tmp_path, key_secret="octavo-key")
    second = Operated(plane, plane_namespace, tmp_path, user=first.user, identity="two", key_secret="octavo-key")
    with first, second:
        for each in (first, second):
            eventually(lambda each=each: _probe(each, "/readyz") == 200, says=each.operator.last_words)
        secrets = plane.call("GET", f"/api/v1/namespaces/{plane_namespace}/secrets")["items"]
        assert [secret["metadata"]["name"] for secret in secrets] == ["octavo-key"]
        first.operator.check()
        second.operator.check()


def test_the_next_leader_restores_a_deleted_key(plane: ControlPlane, plane_namespace: str, tmp_path: Path) -> None:
    secret = f"/api/v1/namespaces/{plane_namespace}/secrets/octavo-key"
    first = Operated(plane, plane_namespace, tmp_path, key_secret="octavo-key")
    second = Operated(plane, plane_namespace, tmp_path, user=first.user, identity="two", key_secret="octavo-key")
    with first:
        eventually(lambda: first.holder() == "one", says=first.operator.last_words)
        with second:
            eventually(lambda: _probe(second, "/readyz") == 200, says=second.operator.last_words)
            key = plane.call("GET", secret)["data"]
            plane.call("DELETE", secret)
            assert first.operator.stop() == 0
            eventually(lambda: plane.answers(secret), says=second.operator.last_words)
            assert plane.call("GET", secret)["data"] == key
