"""The operator with the rights of the chart: they allow each of its calls, and it uses each of them."""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml
from octavo_testing.audit_log import Call
from octavo_testing.chart import CHART, HELM_MISSING, helm_binary, render, run_helm
from octavo_testing.component import Component
from octavo_testing.control_plane import (
    CRDS,
    GARBAGE,
    LIMIT_S,
    NAMESPACES,
    ControlPlane,
    control_plane,
    missing_tools,
)
from octavo_testing.infsvc_cases import HOST, KEYS, OPEN, Case
from octavo_testing.rbac import Right, documented_rights, granted_rights, refused_calls, used_rights
from octavo_testing.serve_command import free_port

pytestmark = [pytest.mark.skipif(helm_binary() is None, reason=HELM_MISSING)]

SYSTEM, SERVED = "octavo-system", "served"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
SERVICES = f"/apis/serving.octavo.dev/v1alpha1/namespaces/{SERVED}/inferenceservices"
EVERYTHING = {"monitoring": {"podMonitors": True}, "gatewayApi": {"enabled": True}}
#: Kinds of other projects' CRDs.
FOREIGN = (
    ("monitoring.coreos.com", "v1", "PodMonitor"),
    ("gateway.networking.k8s.io", "v1", "HTTPRoute"),
    ("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet"),
)
OVER_SERVICES, OWN = "The operator, over services", "The operator, in its own namespace"
API_SERVICE = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta2.custom.metrics.k8s.io"
METRICS = "The operator, for the metrics API"
#: Rights that are used only with running pods: the suite in e2e/ exercises them.
NEEDS_PODS = {Right("", "pods/status", "patch")} | {
    Right("events.k8s.io", "events", verb) for verb in ("list", "update")
}

GATEWAY = {"gateway": {"parentRefs": [{"name": "public"}]}}
CLAIM = {"model": {"uri": "hf://a/b", "cache": {"mode": "PVC", "size": "1Gi"}}}
#: Name -> spec. The services are created, edited so that all optional children go, and deleted.
MADE: dict[str, Any] = {
    "host": {"exposure": HOST, "auth": KEYS, "autoscaling": {"maxReplicas": 1}} | CLAIM,
    "gateway": {"exposure": GATEWAY, "auth": OPEN},
    "groups": {"parallelism": {"tensor": 2, "nodes": 2}},
}
EDITED: dict[str, Any] = {
    "host": {"networkPolicy": {"enabled": False}},
    "gateway": {"router": {"ref": {"name": "host"}}},
    "groups": {},
}


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    if missing := missing_tools():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("plane")
    with control_plane(folder, audit=True, controllers=(GARBAGE, NAMESPACES)) as running:
        for name in (SYSTEM, SERVED):
            running.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        for group, version, kind in FOREIGN:
            running.call("POST", CRDS, _foreign(group, version, kind))
        yield running


def _foreign(group: str, version: str, kind: str) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }


@contextmanager
def _installed(plane: ControlPlane, folder: Path, values: dict[str, Any], *flags: str) -> Iterator[Component]:
    """Run the operator with the arguments and the account of the chart's Deployment."""
    where, kubeconfig = ["--namespace", SYSTEM], plane.kubeconfig()
    made = run_helm("install", "octavo", str(CHART), *where, *flags, values=values, kubeconfig=kubeconfig)
    assert made.returncode == 0, made.stderr
    (deployment,) = [m for m in render(values, namespace=SYSTEM) if m["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    user = plane.issue_token(SYSTEM, pod["serviceAccountName"])
    env = os.environ | {"KUBECONFIG": str(plane.kubeconfig(user)), "POD_NAME": "octavo-0", "POD_NAMESPACE": SYSTEM}
    args = [*pod["containers"][0]["args"], f"--liveness=http://127.0.0.1:{free_port()}/healthz"]
    if any(arg.startswith("--metrics-api-port") for arg in args):
        args.append(f"--metrics-api-port={free_port()}")
    operator = Component(
        "operator", [sys.executable, "-m", "octavo_operator.main", *args], folder / "operator.log", env
    )
    operator.start()
    try:
        yield operator
    finally:
        operator.stop()
        run_helm("uninstall", "octavo", *where, kubeconfig=kubeconfig)


def _until(holds: Callable[[], bool], operator: Component) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        operator.assert_running()
        assert time.monotonic() < deadline, operator.log_tail()
        time.sleep(0.1)


def _settle(plane: ControlPlane, operator: Component, specs: dict[str, Any]) -> None:
    """Wait until each status is of the latest spec and its rollout is complete."""

    def is_settled(name: str) -> bool:
        found = plane.call("GET", f"{SERVICES}/{name}")
        status = found.get("status", {})
        conditions = {condition["type"]: condition["reason"] for condition in status.get("conditions", ())}
        is_seen = status.get("observedGeneration") == found["metadata"]["generation"]
        return is_seen and conditions.get("Progressing") == "Complete" and conditions.get("Accepted") == "Valid"

    _until(lambda: all(is_settled(name) for name in specs), operator)


def _write(plane: ControlPlane, specs: dict[str, Any]) -> None:
    for name, spec in specs.items():
        manifest = Case("", spec | {"replicas": 0}, name=name).manifest()
        kind = "application/apply-patch+yaml"
        plane.call("PATCH", f"{SERVICES}/{name}?fieldManager=person&force=true", manifest, kind=kind)


@pytest.fixture(scope="module")
def history(audited: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """The operator's calls while services were created, edited, changed by hand and deleted."""
    with _installed(audited, tmp_path_factory.mktemp("operator"), EVERYTHING, "--take-ownership") as operator:
        for specs in (MADE, EDITED):
            _write(audited, specs)
            _settle(audited, operator, specs)
        for _ in range(2):  # the same event twice
            _wait_for_repair(audited, operator, f"/api/v1/namespaces/{SERVED}/services/host")
        _wait_for_scaling(audited, operator)
        for name in EDITED:
            audited.call("DELETE", f"{SERVICES}/{name}")
        _until(lambda: not _exists(audited, f"/apis/apps/v1/namespaces/{SERVED}/deployments/host-router"), operator)
        _until(lambda: _is_renewed(audited), operator)
        _until(lambda: "caBundle" in audited.call("GET", API_SERVICE)["spec"], operator)
        return audited.audit.calls(user=":octavo-operator")


def _wait_for_scaling(plane: ControlPlane, operator: Component) -> None:
    """Create a service with fewer replicas than its autoscaling allows, and wait until the operator has raised them."""
    scaling = {"minReplicas": 2, "maxReplicas": 2, "provider": "Operator"}
    plane.call("POST", SERVICES, Case("", {"replicas": 1, "autoscaling": scaling}, name="scaled").manifest())
    _until(lambda: plane.call("GET", f"{SERVICES}/scaled")["spec"]["replicas"] == 2, operator)
    plane.call("DELETE", f"{SERVICES}/scaled")


def _is_renewed(plane: ControlPlane) -> bool:
    """Return whether the operator has renewed its Lease, which takes some seconds."""
    leases = plane.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases")["items"]
    return any(lease["spec"]["renewTime"] != lease["spec"]["acquireTime"] for lease in leases)


def _wait_for_repair(plane: ControlPlane, operator: Component, path: str) -> None:
    """Delete an object and wait until the operator has created it again."""
    uid = plane.call("GET", path)["metadata"]["uid"]
    plane.call("DELETE", path)
    _until(lambda: _exists(plane, path) and plane.call("GET", path)["metadata"]["uid"] != uid, operator)


def _exists(plane: ControlPlane, path: str) -> bool:
    try:
        plane.call("GET", path)
    except HTTPError:
        return False
    return True


def test_no_call_of_the_operator_is_refused(history: list[Call]) -> None:
    assert refused_calls(history) == []
    assert len(history) > 50


def test_every_right_is_used_or_has_a_reason(history: list[Call]) -> None:
    table = documented_rights(OVER_SERVICES) | documented_rights(OWN) | documented_rights(METRICS)
    excused = {right for right, reason in table.items() if reason}
    rights = granted_rights(rule for _, rules in _roles(EVERYTHING) for rule in rules)
    assert sorted(rights - used_rights(history) - excused - NEEDS_PODS) == []
    assert sorted(excused & used_rights(history)) == [], "these are used: their reasons can go"


def _roles(values: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Names and rules of the roles of the operator's account."""
    made = [m for m in render(values) if m["kind"] in ("Role", "ClusterRole")]
    ours = [m for m in made if m["metadata"]["name"].removesuffix("-own").endswith("-operator")]
    return [(m["metadata"]["name"], m["rules"]) for m in ours]


@pytest.mark.parametrize("values", [EVERYTHING, EVERYTHING | {"watchNamespaces": [SERVED]}], ids=["cluster", "some"])
def test_the_guide_has_the_rights_that_the_chart_grants(values: dict[str, Any]) -> None:
    roles = _roles(values)
    assert {name for name, _ in roles} == {"octavo-operator", "octavo-operator-own"}
    bind = Right("rbac.authorization.k8s.io", "clusterroles", "bind")
    granted = granted_rights(rule for _, rules in roles for rule in rules)
    sections = (OVER_SERVICES, OWN, *[METRICS] * ("watchNamespaces" not in values))
    documented = {right for section in sections for right in documented_rights(section)}
    assert documented == {bind if right == replace(bind, resource="roles") else right for right in granted}


def test_the_guide_has_the_rights_of_users_and_routers() -> None:
    roles = {m["metadata"]["name"]: m["rules"] for m in render({}) if m["kind"] == "ClusterRole"}
    people = granted_rights(rule for name in ("octavo-view", "octavo-edit") for rule in roles[name])
    assert documented_rights("People").keys() == people
    assert documented_rights("A router").keys() == granted_rights(roles["octavo-router"])


@pytest.mark.parametrize(("values", "kind"), [({}, "ClusterRole"), ({"watchNamespaces": [SERVED]}, "Role")])
def test_routers_are_bound_to_the_role_of_the_chart(values: dict[str, Any], kind: str) -> None:
    made = render(values)
    (args,) = [m["spec"]["template"]["spec"]["containers"][0]["args"] for m in made if m["kind"] == "Deployment"]
    assert f"--router-role={kind}/octavo-router" in args
    (role,) = [m for m in made if m["kind"] == kind and m["metadata"]["name"] == "octavo-router"]
    assert role["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert role["metadata"].get("namespace") == (SERVED if kind == "Role" else None)


def test_an_operator_of_namespaces_needs_no_cluster_role(
    audited: ControlPlane, tmp_path: Path, history: list[Call]
) -> None:
    values = {"watchNamespaces": [SERVED], "crds": {"install": False}}
    assert {m["metadata"].get("namespace") for m in render(values, namespace=SYSTEM)} == {SYSTEM, SERVED}
    since = audited.audit.mark()
    with _installed(audited, tmp_path, values) as operator:
        _write(audited, {"few": {}})
        _settle(audited, operator, {"few": {}})
    calls = audited.audit.calls(since=since, user=":octavo-operator")
    assert refused_calls(calls) == []
    assert {call.namespace for call in calls if call.resource} == {SYSTEM, SERVED}


def test_router_policies_admit_the_operator_of_the_chart(
    audited: ControlPlane, tmp_path: Path, history: list[Call]
) -> None:
    values = {"commonLabels": {"app.kubernetes.io/name": "ours"}, "operator": {"podLabels": {"team": "a"}}}
    with _installed(audited, tmp_path, values) as operator:
        _write(audited, {"barred": {}})
        _settle(audited, operator, {"barred": {}})
    policy = audited.call("GET", f"/apis/networking.k8s.io/v1/namespaces/{SERVED}/networkpolicies/barred-router")
    (rule,) = [rule for rule in policy["spec"]["ingress"] if [port["port"] for port in rule["ports"]] == [8001]]
    (peer,) = rule["from"]
    (deployment,) = [m for m in render(values, namespace=SYSTEM) if m["kind"] == "Deployment"]
    pod_labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= pod_labels.items()
    namespaces = audited.call("GET", "/api/v1/namespaces")["items"]
    wanted = peer["namespaceSelector"]["matchLabels"].items()
    assert [n["metadata"]["name"] for n in namespaces if wanted <= n["metadata"]["labels"].items()] == [SYSTEM]


def test_helm_test_checks_for_a_leading_operator(audited: ControlPlane, tmp_path: Path, history: list[Call]) -> None:
    """The test runs the command of the hook's pod, with the pod's account and rights."""
    hooks = _test_hooks(audited)
    account, (pod,) = hooks["ServiceAccount"][0]["metadata"]["name"], hooks["Pod"]
    env = os.environ | {"KUBECONFIG": str(audited.kubeconfig(audited.issue_token(SYSTEM, account)))}
    command = [sys.executable, *pod["spec"]["containers"][0]["command"][1:], *pod["spec"]["containers"][0]["args"]]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--patience=0"], env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )

    alone = run()
    assert (alone.returncode, alone.stderr) == (1, "")
    assert "no operator leads (the Lease has no holder): read the log, kubectl -n octavo-system logs" in alone.stdout
    with _installed(audited, tmp_path, {}) as operator:
        _until(lambda: "leads from now on" in operator.log.read_text(), operator)
        led = run()
    assert led.stdout.splitlines() == [
        "octavo-0 leads",
        f"the API server accepts an InferenceService in the namespace {SYSTEM}",
    ]
    assert led.returncode == 0


def _test_hooks(plane: ControlPlane) -> dict[str, list[dict[str, Any]]]:
    """The hooks of `helm test` by kind; creates their account and its rights."""
    made = run_helm("template", "octavo", str(CHART), "-n", SYSTEM, "-s", "templates/tests/installed.yaml")
    hooks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for manifest in filter(None, yaml.safe_load_all(made.stdout)):
        hooks[manifest["kind"]].append(manifest)
    for kind, base in (("ServiceAccount", "/api/v1"), ("Role", RBAC), ("RoleBinding", RBAC)):
        for manifest in hooks[kind]:
            plane.call("POST", f"{base}/namespaces/{SYSTEM}/{kind.lower()}s", manifest)
    return hooks
