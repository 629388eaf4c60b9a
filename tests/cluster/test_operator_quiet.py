"""The operator makes no needless writes, leaves no objects behind, and reads no other namespaces."""

from pathlib import Path

from kubernetes import config
from kubernetes.dynamic import DynamicClient
from octavo_testing.control_plane import ControlPlane
from octavo_testing.infsvc_cases import Case
from octavo_testing.operator_namespace import OperatorNamespace
from octavo_testing.waiting import eventually


def test_applying_the_same_file_again_causes_no_write(
    plane: ControlPlane, plane_namespace: str, tmp_path: Path
) -> None:
    with (
        OperatorNamespace(plane, plane_namespace, tmp_path) as operated,
        config.new_client_from_config(str(plane.kubeconfig())) as api,
    ):
        kind = DynamicClient(api).resources.get(api_version="serving.octavo.dev/v1alpha1", kind="InferenceService")
        manifest = Case("", {"replicas": 2}, name="same").manifest()

        def apply() -> str:
            answer = kind.server_side_apply(manifest, namespace=plane_namespace, field_manager="kubectl")
            version: str = answer.metadata.resourceVersion
            return version

        apply()
        operated.wait_until_settled("same")
        _until_quiet(operated)
        since, version = plane.audit.mark(), apply()
        assert apply() == version
        operated.create("marker")
        operated.wait_until_settled("marker")
        assert not [name for _, name in operated.writes(since) if not name.startswith(("marker", "later"))]


def test_a_restarted_operator_writes_nothing(plane: ControlPlane, plane_namespace: str, tmp_path: Path) -> None:
    with OperatorNamespace(plane, plane_namespace, tmp_path) as operated:
        operated.create("kept")
        operated.wait_until_settled("kept")
        _until_quiet(operated)
        operated.operator.stop()
        since = plane.audit.mark()
        operated.operator.start()
        operated.create("marker")
        operated.wait_until_settled("marker")
        assert not [name for _, name in operated.writes(since) if not name.startswith(("marker", "later"))]


def test_a_service_deleted_without_an_operator_leaves_no_objects(
    plane: ControlPlane, plane_namespace: str, tmp_path: Path
) -> None:
    with OperatorNamespace(plane, plane_namespace, tmp_path) as operated:
        operated.create("gone")
        operated.wait_until_settled("gone")
        operated.operator.stop()
        assert len(operated.leftover_objects()) > 5
        operated.delete("gone")
        eventually(lambda: not operated.leftover_objects(), describe=operated.leftover_objects)


def test_an_operator_reads_only_its_namespaces(plane: ControlPlane, tmp_path: Path) -> None:
    """Requests for the list of kinds are allowed: every account may read it."""
    names = ["octavo-test-one", "octavo-test-two"]
    for name in names:
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    one = OperatorNamespace(plane, names[0], tmp_path, namespaces=tuple(names))
    two = OperatorNamespace(plane, names[1], tmp_path, user=one.user)
    since = plane.audit.mark()
    with one:
        for each in (one, two):
            each.create("served")
        one.wait_until_settled("served")
        eventually(lambda: two.status("served"), describe=one.operator.log_tail)
    calls = one.calls(since)
    assert {call.namespace for call in calls if call.resource} == {*names}
    assert all(call.path.startswith(("/api", "/apis")) and call.verb == "get" for call in calls if not call.resource)
    for name in names:
        plane.call("DELETE", f"/api/v1/namespaces/{name}")


def _until_quiet(operated: OperatorNamespace) -> None:
    """Wait until a further service is settled: then all earlier work is done."""
    operated.create("later")
    operated.wait_until_settled("later")
