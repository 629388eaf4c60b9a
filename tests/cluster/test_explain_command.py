"""`octavo explain infsvc` against a real API server: existing and missing services, missing rights, outages."""

import json
from pathlib import Path
from typing import Any

import pytest
from octavo_operator.cluster.client import KINDS
from octavo_operator.spec.service import KIND
from octavo_server.cli.main import main
from octavo_testing.control_plane import ControlPlane
from octavo_testing.infsvc_cases import Case

NOW = "2026-11-21T20:00:00Z"
SERVICES = "/apis/serving.octavo.dev/v1alpha1/namespaces/{}/inferenceservices"
MERGE = "application/merge-patch+json"
READING = {"apiGroups": ["serving.octavo.dev"], "resources": ["inferenceservices"], "verbs": ["get", "list"]}


class Shell:
    """Runs `octavo explain infsvc` with a kubeconfig; returns the exit code and the output."""

    def __init__(self, plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._plane, self._namespace, self._capsys = plane, namespace, capsys
        self.kubeconfig = plane.kubeconfig()

    def explain(self, *arguments: str) -> tuple[int, str]:
        argv = ["explain", "infsvc", *arguments, "-n", self._namespace, "--kubeconfig", str(self.kubeconfig)]
        code = main(argv)
        said = self._capsys.readouterr()
        return code, said.out + said.err

    def make(self, name: str, *conditions: tuple[str, str, str, str]) -> None:
        path = SERVICES.format(self._namespace)
        self._plane.call("POST", path, Case("", {}, name=name).manifest())
        rows = [
            {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": NOW}
            for type_, status, reason, message in conditions
        ]
        if rows:
            status = {"status": {"observedGeneration": 1, "url": f"http://{name}", "conditions": rows}}
            self._plane.call("PATCH", f"{path}/{name}/status", status, kind=MERGE)

    def make_pod(self, service: str, component: str, **status: Any) -> str:
        path, name = f"/api/v1/namespaces/{self._namespace}/pods", f"{service}-{component}-1"
        labels = {"serving.octavo.dev/service": service, "app.kubernetes.io/component": component}
        spec = {"containers": [{"name": component, "image": "none.invalid/none"}]}
        self._plane.call("POST", path, {"metadata": {"name": name, "labels": labels}, "spec": spec})
        self._plane.call("PATCH", f"{path}/{name}/status", {"status": status}, kind=MERGE)
        about = {"kind": "Pod", "name": name, "namespace": self._namespace}
        event = {
            "metadata": {"name": f"{name}.1"},
            "involvedObject": about,
            "type": "Warning",
            "reason": "BackOff",
            "message": "restarting failed container",
            "lastTimestamp": NOW,
            "count": 3,
        }
        self._plane.call("POST", f"/api/v1/namespaces/{self._namespace}/events", event)
        return name


@pytest.fixture
def shell(plane: ControlPlane, plane_namespace: str, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(plane, plane_namespace, capsys)


CRASH = ("WorkloadReady", "False", "CrashLoop", "1 of 1: llm-engine-1: exit code 1: octavo: bad flag")
ENDED = {"exitCode": 1, "message": "Traceback\noctavo: bad flag", "startedAt": NOW, "finishedAt": NOW}
CRASHED = {
    "name": "engine",
    "image": "i",
    "imageID": "",
    "ready": False,
    "restartCount": 2,
    "lastState": {"terminated": ENDED},
}


def test_explain_shows_the_cause_of_a_crash_loop(shell: Shell) -> None:
    shell.make("llm", ("Accepted", "True", "Valid", "fine"), CRASH)
    name = shell.make_pod("llm", "engine", phase="Running", containerStatuses=[CRASHED])
    code, said = shell.explain("llm")
    assert code == 1
    for part in (
        "ok  Accepted Valid",
        "NO  WorkloadReady CrashLoop   <- here",
        "Not ready: CrashLoop.",
        "Meaning: The engine fails repeatedly",
        f"{name} (engine): CrashLoop, restarted 2 times\n      exit code 1: octavo: bad flag",
        f"{NOW}  Warning  Pod/{name}  BackOff  restarting failed container (x3)",
        f"kubectl logs {name} --previous -n ",
    ):
        assert part in said, said
    code, said = shell.explain("llm", "-o", "json")
    found = json.loads(said)
    assert (code, found["is_ready"], found["cause"]["reason"]) == (1, False, "CrashLoop")
    assert found["pods"][0]["message"] == "exit code 1: octavo: bad flag"


def test_explain_shows_ready_and_unseen_services(shell: Shell) -> None:
    shell.make("good", ("Accepted", "True", "Valid", "fine"), ("Ready", "True", "Serving", "all"))
    assert shell.explain("good") == (0, shell.explain("good")[1])
    assert "Ready: it serves requests at http://good" in shell.explain("good")[1]
    assert shell.explain()[0] == 0
    shell.make("new")
    code, said = shell.explain("new")
    assert code == 1
    assert "Not ready: NotSeen.\n  the spec has generation 1, the operator has processed none" in said
    code, table = shell.explain()
    assert code == 1
    assert [line.split()[1] for line in table.splitlines()] == ["NAME", "good", "new"]
    assert [one["name"] for one in json.loads(shell.explain("-o", "json")[1])] == ["good", "new"]
    assert " new " in shell.explain("-A")[1]


def test_a_shared_routers_pods_are_shown(shell: Shell, plane: ControlPlane, plane_namespace: str) -> None:
    shell.make("owner")
    router = shell.make_pod("owner", "router", phase="Pending")
    manifest = Case("", {"router": {"ref": {"name": "owner"}}}, name="guest").manifest()
    plane.call("POST", SERVICES.format(plane_namespace), manifest)
    assert f"{router} (router): starts" in shell.explain("guest")[1]


def test_explain_names_a_missing_service(shell: Shell, plane_namespace: str) -> None:
    there = f"octavo: there is no InferenceService 'llm' in the namespace '{plane_namespace}'"
    assert shell.explain("llm") == (1, f"{there}: it has no InferenceServices; select another namespace with -n.\n")
    assert shell.explain()[1] == f"octavo: there are no InferenceServices in the namespace '{plane_namespace}'.\n"
    shell.make("other")
    assert shell.explain("llm") == (1, f"{there}: there are other.\n")


def test_explain_reports_missing_rights(shell: Shell, plane: ControlPlane, plane_namespace: str) -> None:
    shell.make("llm")
    shell.kubeconfig = plane.kubeconfig(plane.create_account(plane_namespace, "stranger", []))
    code, said = shell.explain("llm")
    assert code == 1
    assert f"octavo: you may not get inferenceservices in the namespace '{plane_namespace}': ask for a role" in said
    assert "you may not list inferenceservices in all namespaces" in shell.explain("-A")[1]
    shell.kubeconfig = plane.kubeconfig(plane.create_account(plane_namespace, "reader", [READING]))
    code, said = shell.explain("llm")
    assert "Not ready: NotSeen." in said
    assert "(pods can't be listed: pods is forbidden" in said
    assert "(events can't be listed: events.events.k8s.io is forbidden" in said


def test_explain_reports_refused_credentials(shell: Shell, plane: ControlPlane, tmp_path: Path) -> None:
    shell.kubeconfig = tmp_path / "wrong"
    content = json.loads(plane.kubeconfig().read_text())
    content["users"][0]["user"]["token"] = "wrong"
    shell.kubeconfig.write_text(json.dumps(content))
    assert f"the API server at {plane.url} doesn't accept these credentials" in shell.explain("llm")[1]


def test_explain_reports_a_missing_crd(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that the API server does not serve stands for the missing CRD."""
    monkeypatch.setitem(KINDS, KIND, ("serving.unknown.dev/v1", "inferenceservices"))
    for arguments in (("llm",), ()):
        code, said = shell.explain(*arguments)
        assert code == 1
        assert said.startswith("octavo: this cluster has no InferenceServices: the CRD is not installed. helm install")


def test_explain_names_an_unreachable_api_server(shell: Shell, plane: ControlPlane) -> None:
    with plane.apiserver_down():
        code, said = shell.explain("llm")
    assert (code, said) == (
        1,
        f"octavo: the API server at {plane.url} can't be reached: [Errno 111] Connection refused.\n",
    )


def test_explain_reports_a_missing_kubeconfig(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shell.kubeconfig = tmp_path / "absent"
    assert f"octavo: {tmp_path / 'absent'} can't be used: " in shell.explain("llm")[1]
    shell.kubeconfig = tmp_path / "other"
    assert main(["explain", "infsvc", "llm", "-A"]) == 2
