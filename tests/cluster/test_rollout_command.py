"""`octavo rollout` against a real API server: pause, resume and status of a service."""

import pytest
from octavo_operator.explain.rollout import rollout
from octavo_testing.control_plane import ControlPlane
from octavo_testing.infsvc_cases import Case

SERVICES = "/apis/serving.octavo.dev/v1alpha1/namespaces/{}/inferenceservices"


def test_a_rollout_is_paused_and_resumed(
    plane: ControlPlane, plane_namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, where = (
        SERVICES.format(plane_namespace),
        {"namespace": plane_namespace, "kubeconfig": str(plane.kubeconfig())},
    )
    plane.call("POST", path, Case("", {"rollout": {"maxSurge": 2}}, name="llm").manifest())
    codes, specs = [], []
    for action in ("pause", "pause", "resume", "resume"):
        codes.append(rollout(action, "llm", **where))
        specs.append(plane.call("GET", f"{path}/llm")["spec"]["rollout"])
    assert codes == [0, 1, 0, 1]
    assert specs == [{"maxSurge": 2, "paused": True}] * 2 + [{"maxSurge": 2}] * 2
    assert rollout("status", "llm", watch=False, **where) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == ['infsvc "llm" paused', 'infsvc "llm" resumed']
    assert rollout("pause", "another", **where) == 1
    assert "there is no InferenceService 'another'" in capsys.readouterr().err
