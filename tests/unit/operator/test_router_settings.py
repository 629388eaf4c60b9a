"""Settings of a service's router: more flags and variables, and the type and annotations of the public Service."""

import json
from typing import Any

import pytest
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import engine_revision
from octavo_operator.desired.network import internal_url
from octavo_operator.observed import Observed, ServiceBehind
from octavo_operator.plan.actions import Apply
from octavo_operator.plan.apply_digest import with_digest
from octavo_operator.plan.child_actions import child_actions
from octavo_operator.plan.plan import plan
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_operator.spec.access import ROUTER_FLAGS
from octavo_server.cli.main import build_parser
from octavo_testing.infsvc_cases import HOST, OPEN, Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")


def _service(**spec: Any) -> InferenceService:
    return read_service(stored(Case("", spec, name="llm")))


def _child(service: InferenceService, kind: str, name: str) -> dict[str, Any]:
    (found,) = [c for c in desired_children(service, SETTINGS) if (c["kind"], c["metadata"]["name"]) == (kind, name)]
    return found


def _router(service: InferenceService) -> dict[str, Any]:
    (container,) = _child(service, "Deployment", "llm-router")["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def test_a_router_gets_more_flags_and_variables() -> None:
    env = [
        {"name": "OTEL_SERVICE_NAME", "value": "llm"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    plain, found = _router(_service()), _router(_service(router={"extraArgs": ["--max-retries=3"], "env": env}))
    assert found["args"] == [*plain["args"], "--max-retries=3"]
    assert found["env"] == [*plain["env"], *env]
    build_parser().parse_args(found["args"])


def test_flags_of_the_operator_are_reserved() -> None:
    auth = {"apiKeysSecretRef": {"name": "keys"}, "limits": {"name": "limits-of-keys"}}
    service = _service(auth=auth, exposure={"ingress": {"host": "a.b", "path": "/x"}})
    flags = {arg.partition("=")[0].removeprefix("--") for arg in _router(service)["args"][1:]}
    assert flags - {"log-format"} <= set(ROUTER_FLAGS.split("|"))
    assert {"api-key-file", "tenants-file", "root-path", "kubernetes"} <= flags


@pytest.mark.parametrize("auth", [{"apiKeysSecretRef": {"name": "keys"}}, {"required": False}])
def test_limits_of_keys_are_a_mounted_file_of_routers_only(auth: dict[str, Any]) -> None:
    """A change of the ConfigMap needs no rollout, and the first limits replace no engine."""
    plain, limited = _service(auth=auth), _service(auth=auth | {"limits": {"name": "limits-of-keys"}})
    found = _router(limited)
    assert found["args"] == [*_router(plain)["args"], "--tenants-file=/etc/octavo/tenants/tenants.yaml"]
    mount = {"name": "tenants", "mountPath": "/etc/octavo/tenants", "readOnly": True}
    assert found["volumeMounts"] == [*_router(plain)["volumeMounts"], mount]
    volumes = _child(limited, "Deployment", "llm-router")["spec"]["template"]["spec"]["volumes"]
    assert volumes[-1] == {"name": "tenants", "configMap": {"name": "limits-of-keys"}}
    build_parser().parse_args(found["args"])
    assert engine_revision(limited, SETTINGS) == engine_revision(plain, SETTINGS)


def test_the_public_service_has_the_type_and_annotations_of_the_spec() -> None:
    """Without them, it has no field that a person or a cloud controller may want to set."""
    plain = _child(_service(), "Service", "llm")
    assert ("type" in plain["spec"], "annotations" in plain["metadata"]) == (False, False)
    annotations = {"cloud.google.com/neg": '{"ingress": true}'}
    wanted = {"type": "LoadBalancer", "annotations": annotations}
    found = _child(_service(router={"service": wanted}, auth=OPEN), "Service", "llm")
    assert found["metadata"]["annotations"] == annotations
    assert found["spec"] == plain["spec"] | {"type": "LoadBalancer"}
    shared = _child(_service(router={"ref": {"name": "other"}}), "Service", "llm")
    assert "type" not in shared["spec"]


def _live(service: InferenceService, **status: Any) -> dict[str, Any]:
    """The public Service as a cloud's controllers leave it."""
    live = with_digest(_child(service, "Service", "llm"))
    (port,) = live["spec"]["ports"]
    live["spec"] |= {
        "ports": [port | {"nodePort": 30123}],
        "clusterIP": "10.96.0.7",
        "externalTrafficPolicy": "Cluster",
        "allocateLoadBalancerNodePorts": True,
        "loadBalancerClass": "service.k8s.aws/nlb",
        "healthCheckNodePort": 30999,
    }
    live["metadata"] |= {"finalizers": ["service.kubernetes.io/load-balancer-cleanup"]}
    live["metadata"]["annotations"] |= {"cloud.google.com/neg-status": "{}"}
    return live | {"status": status}


def test_fields_that_a_cloud_sets_are_kept() -> None:
    service = _service(router={"service": {"type": "LoadBalancer"}}, auth=OPEN)
    manifest, live = with_digest(_child(service, "Service", "llm")), _live(service)
    assert list(child_actions(service, Observed(), manifest, live)) == []
    live["spec"]["type"] = "ClusterIP"
    (repair,) = child_actions(service, Observed(), manifest, live)
    assert isinstance(repair, Apply)
    assert repair.repairs
    assert not {"nodePort", "loadBalancerClass", "externalTrafficPolicy"} & set(str(repair.manifest).split("'"))


@pytest.mark.parametrize(
    ("ingress", "spec", "url"),
    [
        ([{"ip": "203.0.113.7"}], {}, "http://203.0.113.7"),
        ([{"ip": "2001:db8::7"}], {}, "http://[2001:db8::7]"),
        ([{"hostname": "x.elb.example.com"}], {}, "http://x.elb.example.com"),
        ([], {}, None),
        ([{"ip": "203.0.113.7"}], {"exposure": HOST}, "http://203.0.113.7"),
    ],
    ids=str,
)
def test_the_status_has_the_address_of_a_load_balancer(
    ingress: list[dict[str, str]], spec: dict[str, Any], url: str | None
) -> None:
    service = _service(router={"service": {"type": "LoadBalancer"}}, auth=OPEN, **spec)
    seen = Observed(children={("Service", "llm"): _live(service, loadBalancer={"ingress": ingress})})
    status = plan(service, seen, SETTINGS, now="t", new_secrets=SECRETS).status
    found = {address["type"]: address["url"] for address in status["addresses"]}
    assert found.get("LoadBalancer") == url
    assert status["url"] == found.get("Ingress", url or internal_url(service, SETTINGS))


def test_routers_read_their_services_from_a_mounted_config_map() -> None:
    behind = {"b": ServiceBehind(("b1", "b2")), "a": ServiceBehind(("a",))}
    made = {(m["kind"], m["metadata"]["name"]): m for m in desired_children(_service(), SETTINGS, behind_router=behind)}
    text = made["ConfigMap", "llm-router"]["data"]["services.json"]
    assert json.loads(text) == {"services": [{"name": "a", "models": ["a"]}, {"name": "b", "models": ["b1", "b2"]}]}
    pod = made["Deployment", "llm-router"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "--services-file=/etc/octavo/services/services.json" in container["args"]
    assert {"name": "services", "mountPath": "/etc/octavo/services", "readOnly": True} in container["volumeMounts"]
    assert {"name": "services", "configMap": {"name": "llm-router"}} in pod["volumes"]
