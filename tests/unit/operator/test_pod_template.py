"""`podTemplate`: merged into engine and router pods, without what the operator needs."""

from typing import Any

import pytest
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import desired_engine, template_conflicts
from octavo_operator.desired.pod_template import KEYS
from octavo_operator.desired.router import router_template_conflicts
from octavo_operator.names import ENGINE, ROUTER
from octavo_operator.observed import Observed
from octavo_operator.plan.status_conditions import conditions_of
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_operator.spec.service import InvalidSpec
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.pod_templates import NUM_TEMPLATES, random_template

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
KEPT = (
    *("args", "image", "imagePullPolicy", "startupProbe", "readinessProbe", "livenessProbe"),
    "terminationMessagePolicy",
)


def service_with(engine: Any = None, router: Any = None) -> InferenceService:
    spec = {name: {"podTemplate": given} for name, given in (("engine", engine), ("router", router)) if given}
    return read_service(stored(Case("", spec, name="llm")))


def pods_of(service: InferenceService) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod templates of engines and routers."""
    (router,) = [made for made in desired_children(service, SETTINGS) if made["kind"] == "Deployment"]
    made = (desired_engine(service, SETTINGS, replicas=1), router)
    engine, routers = (deployment["spec"]["template"] for deployment in made)
    return engine, routers


def main_of(pod: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [container for container in pod["spec"]["containers"] if container["name"] == name]
    return found


@pytest.mark.parametrize("seed", range(NUM_TEMPLATES))
def test_a_template_adds_and_keeps_what_the_operator_needs(seed: int) -> None:
    given = {ENGINE: random_template(seed, ENGINE), ROUTER: random_template(seed + NUM_TEMPLATES, ROUTER)}
    service = service_with(given[ENGINE], given[ROUTER])
    assert template_conflicts(service, SETTINGS) == router_template_conflicts(service, SETTINGS) == []
    for name, pod, plain in zip((ENGINE, ROUTER), pods_of(service), pods_of(service_with()), strict=True):
        made, own = main_of(pod, name), main_of(plain, name)
        assert {field: made.get(field) for field in KEPT} == {field: own.get(field) for field in KEPT}
        for kind in ("volumeMounts", "ports"):
            assert [item for item in own[kind] if item not in made[kind]] == []
        assert [volume for volume in plain["spec"]["volumes"] if volume not in pod["spec"]["volumes"]] == []
        theirs = given[name].get("spec", {})
        assert {volume["name"] for volume in theirs.get("volumes", ())} <= {v["name"] for v in pod["spec"]["volumes"]}
        for container in theirs.get("containers", ()):
            env = {variable["name"]: variable for variable in main_of(pod, container["name"]).get("env", ())}
            assert {v["name"]: v for v in container.get("env", ())}.items() <= env.items()
        assert pod["metadata"]["labels"].items() >= given[name].get("metadata", {}).get("labels", {}).items()


def test_items_of_lists_are_matched_by_their_keys() -> None:
    env = [
        {"name": "HF_HOME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NEW", "value": "1"},
    ]
    given = {"spec": {"containers": [{"name": "engine", "env": env, "securityContext": {"runAsUser": 5}}]}}
    pod, _ = pods_of(service_with(given))
    container = main_of(pod, "engine")
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["HF_HOME"] == env[0]
    assert {"NEW", "XDG_CACHE_HOME", "OCTAVO_ROUTER_SECRET"} <= variables.keys()
    assert (container["securityContext"]["runAsUser"], container["securityContext"]["readOnlyRootFilesystem"]) == (
        5,
        True,
    )


@pytest.mark.parametrize("name", [*sorted(KEYS), "envFrom"])
def test_a_label_may_have_the_name_of_a_list(name: str) -> None:
    given = {"metadata": {"labels": {name: "prod"}}, "spec": {"nodeSelector": {name: "x"}}}
    spec = {"nodeSelector": {"pool": "a"}, "engine": {"podTemplate": given}}
    service = read_service(stored(Case("", spec, name="llm")))
    pod, _ = pods_of(service)
    assert pod["metadata"]["labels"][name] == "prod"
    assert pod["spec"]["nodeSelector"] == {"pool": "a", name: "x"}


def test_an_added_container_is_restricted_unless_it_asks_otherwise() -> None:
    given = {"spec": {"containers": [
        {"name": "plain", "image": "a"},
        {"name": "own", "image": "b", "securityContext": {"privileged": True}},
    ]}}  # fmt: skip
    pod, _ = pods_of(service_with(given))
    assert main_of(pod, "plain")["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert main_of(pod, "own")["securityContext"] == {"privileged": True}


CONFLICTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"containers": [{"name": "engine", "args": ["x"]}]}, "spec.containers[engine].args"),
    ({"containers": [{"name": "engine", "image": "x"}]}, "spec.containers[engine].image"),
    ({"containers": [{"name": "engine", "readinessProbe": {}}]}, "spec.containers[engine].readinessProbe"),
    ({"containers": [{"name": "engine", "ports": [{"containerPort": 8000}]}]}, "spec.containers[engine].ports[8000]"),
    (
        {"containers": [{"name": "engine", "env": [{"name": "OCTAVO_ROUTER_SECRET", "value": ""}]}]},
        "spec.containers[engine].env[OCTAVO_ROUTER_SECRET]",
    ),
    (
        {"containers": [{"name": "engine", "env": [{"name": "VLLM_API_KEY", "value": "k"}]}]},
        "spec.containers[engine].env[VLLM_API_KEY]",
    ),
    (
        {"containers": [{"name": "engine", "volumeMounts": [{"name": "v", "mountPath": "/tmp"}]}]},
        "spec.containers[engine].volumeMounts[/tmp]",
    ),
    ({"volumes": [{"name": "cache", "emptyDir": {}}]}, "spec.volumes[cache]"),
    ({"terminationGracePeriodSeconds": 5}, "spec.terminationGracePeriodSeconds"),
    ({"readinessGates": []}, "spec.readinessGates"),
)


@pytest.mark.parametrize(("spec", "path"), CONFLICTS, ids=[path for _, path in CONFLICTS])
def test_a_field_of_the_operator_is_named(spec: dict[str, Any], path: str) -> None:
    service = service_with({"spec": spec})
    assert template_conflicts(service, SETTINGS) == [path]
    accepted = conditions_of(service, Observed(), SETTINGS, wanted="r")[0]
    assert (accepted.reason, f"engine.podTemplate.{path}" in accepted.message) == ("PodTemplateConflict", True)


@pytest.mark.parametrize(
    "spec", [{"containers": [{}]}, {"volumes": "x"}, {"containers": [{"name": "a", "ports": [{"name": "p"}]}]}], ids=str
)
def test_an_item_without_its_key_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="podTemplate"):
        service_with({"spec": spec})


def test_a_port_may_be_added_for_each_protocol() -> None:
    ports = [
        {"containerPort": 9000},
        {"containerPort": 9000, "protocol": "UDP"},
        {"containerPort": 8000, "protocol": "UDP"},
    ]
    engine, _ = pods_of(service_with({"spec": {"containers": [{"name": ENGINE, "ports": ports}]}}))
    assert [port for port in main_of(engine, ENGINE)["ports"] if port in ports] == ports
