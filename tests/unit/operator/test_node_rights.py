"""Fields of a spec that give a pod rights on its node are named, and refused by a restricted installation."""

from dataclasses import replace
from typing import Any

import pytest
from octavo_operator.cli import build_parser, settings_of
from octavo_operator.desired.node_rights import node_rights
from octavo_operator.plan.plan import plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import ACCEPTED, Case, stored
from octavo_testing.plan_cluster import SECRETS, PlanCluster

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
RESTRICTED = replace(SETTINGS, restricts_pods=True)


def _service(generation: int = 1, **spec: Any) -> InferenceService:
    return read_service(stored(Case("", spec, name="llm"), generation=generation))


def _engine(**pod: Any) -> dict[str, Any]:
    return {"engine": {"podTemplate": {"spec": pod}}}


def _container(**fields: Any) -> dict[str, Any]:
    return _engine(containers=[{"name": "engine", **fields}])


APPARMOR = "container.apparmor.security.beta.kubernetes.io/engine"
POD, MAIN = "engine.podTemplate.spec", "engine.podTemplate.spec.containers[engine]"
REFUSED = [
    (_engine(hostNetwork=True), f"{POD}.hostNetwork"),
    (_engine(hostPID=True), f"{POD}.hostPID"),
    (_engine(hostIPC=True), f"{POD}.hostIPC"),
    (_engine(nodeName="control-plane"), f"{POD}.nodeName"),
    (_engine(volumes=[{"name": "root", "hostPath": {"path": "/"}}]), f"{POD}.volumes[root].hostPath"),
    (_engine(volumes=[{"name": "root", "hostPath": {}}]), f"{POD}.volumes[root].hostPath"),
    (_engine(securityContext={"sysctls": [{"name": "a", "value": "1"}]}), f"{POD}.securityContext.sysctls[a]"),
    (
        _engine(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        f"{POD}.securityContext.seccompProfile.type",
    ),
    (
        _engine(securityContext={"windowsOptions": {"hostProcess": True}}),
        f"{POD}.securityContext.windowsOptions.hostProcess",
    ),
    (_container(securityContext={"privileged": True}), f"{MAIN}.securityContext.privileged"),
    (_container(securityContext={"procMount": "Unmasked"}), f"{MAIN}.securityContext.procMount"),
    (
        _container(securityContext={"allowPrivilegeEscalation": True}),
        f"{MAIN}.securityContext.allowPrivilegeEscalation",
    ),
    (_container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}), f"{MAIN}.securityContext.capabilities.add"),
    (_container(securityContext={"seLinuxOptions": {"type": "spc_t"}}), f"{MAIN}.securityContext.seLinuxOptions.type"),
    (_container(securityContext={"seLinuxOptions": {"user": "u"}}), f"{MAIN}.securityContext.seLinuxOptions.user"),
    (_container(securityContext={"seLinuxOptions": {"role": "r"}}), f"{MAIN}.securityContext.seLinuxOptions.role"),
    (
        _container(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
        f"{MAIN}.securityContext.appArmorProfile.type",
    ),
    (
        _container(lifecycle={"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}}),
        f"{MAIN}.lifecycle.preStop.httpGet.host",
    ),
    (
        _engine(containers=[{"name": "own", "livenessProbe": {"tcpSocket": {"host": "10.0.0.1", "port": 80}}}]),
        f"{POD}.containers[own].livenessProbe.tcpSocket.host",
    ),
    (_container(ports=[{"containerPort": 9, "hostPort": 9}]), f"{MAIN}.ports[9].hostPort"),
    (
        _engine(initContainers=[{"name": "own", "image": "i", "securityContext": {"privileged": True}}]),
        f"{POD}.initContainers[own].securityContext.privileged",
    ),
    (
        {"router": {"podTemplate": {"spec": {"hostNetwork": True}}}},
        "router.podTemplate.spec.hostNetwork",
    ),
    ({"podMetadata": {"annotations": {APPARMOR: "unconfined"}}}, f"podMetadata.annotations[{APPARMOR}]"),
    (
        {
            "engine": {
                "podTemplate": {
                    "metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}}
                }
            }
        },
        "engine.podTemplate.metadata.annotations[container.apparmor.security.beta.kubernetes.io/engine]",
    ),
    (
        {"model": {"uri": "hf://a/b", "cache": {"mode": "HostPath", "hostPath": "/models"}}},
        "model.cache.hostPath",
    ),
]


@pytest.mark.parametrize(("spec", "path"), REFUSED, ids=[path for _, path in REFUSED])
def test_a_field_with_rights_on_the_node_is_refused_by_its_path(spec: dict[str, Any], path: str) -> None:
    service = _service(**spec)
    assert node_rights(service) == [path]
    (accepted, *_) = plan(service, PlanCluster().observe(), RESTRICTED, now="", new_secrets=SECRETS).status[
        "conditions"
    ]
    assert (accepted["reason"], accepted["status"]) == ("PodTemplateRefused", "False")
    assert accepted["message"].startswith(f"{path}: ")
    (accepted, *_) = plan(service, PlanCluster().observe(), SETTINGS, now="", new_secrets=SECRETS).status["conditions"]
    assert accepted["status"] == "True"


@pytest.mark.parametrize(
    "spec",
    [
        _engine(hostNetwork=False, hostPID=None, securityContext={"runAsUser": 0}),
        _engine(securityContext={"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}),
        _container(securityContext={"seLinuxOptions": {"type": "container_t", "level": "s0:c1"}}),
        _container(securityContext={"procMount": "Default", "privileged": False, "capabilities": {"drop": ["ALL"]}}),
        _container(securityContext={"seccompProfile": {"type": "Localhost", "localhostProfile": "a"}}),
        {"podMetadata": {"annotations": {APPARMOR: "runtime/default"}}},
    ],
    ids=str,
)
def test_fields_that_the_baseline_allows_are_accepted(spec: dict[str, Any]) -> None:
    assert node_rights(_service(**spec)) == []


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_other_specs_are_accepted(case: Case) -> None:
    found = node_rights(read_service(stored(case)))
    assert found == (["model.cache.hostPath"] if "HostPath" in str(case.spec) else [])


def test_a_refused_change_leaves_what_runs_as_it_is() -> None:
    cluster = PlanCluster()

    def run(service: InferenceService) -> None:
        for _ in range(10):
            made = plan(service, cluster.observe(), RESTRICTED, now=cluster.now, new_secrets=SECRETS)
            for action in made.actions:
                cluster.execute(action)
            cluster.status = made.status
            cluster.settle_pods()
            cluster.deliver_endpoints()

    run(_service())
    pods, manifests = {*cluster.pods}, dict(cluster.engine_manifests)
    run(_service(2, replicas=2, **_engine(hostNetwork=True)))
    assert {*cluster.pods} > pods, "it is scaled"
    assert cluster.engine_manifests.keys() == manifests.keys()
    assert "hostNetwork" not in str(cluster.engine_manifests)


def test_the_command_restricts_pods_by_default() -> None:
    images = ["--engine-image=e", "--router-image=r", "--key-file=k"]
    assert settings_of(build_parser().parse_args(images)).restricts_pods
    assert not settings_of(build_parser().parse_args([*images, "--pod-templates=any"])).restricts_pods
