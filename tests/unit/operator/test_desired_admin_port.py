"""A router's admin port: only the operator and Prometheus reach it, and the operator finds it in the pod's spec."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.view import Key, View
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import desired_engine, engine_templates
from octavo_operator.desired.service_secrets import mounted_secrets
from octavo_operator.handlers import EventHandlers
from octavo_operator.names import COMPONENT_LABEL, ROUTER_LABEL, SERVICE_LABEL
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import ACCEPTED, HOST, KEYS, OPEN, Case, stored
from octavo_testing.plan_cluster import SECRETS

SETTINGS = Settings(
    engine_image="engine:1",
    router_image="router:1",
    operator_namespace="octavo-system",
    scraped_from=("monitoring",),
    has_pod_monitors=True,
    has_gateway_api=True,
)
CLIENTS = {"namespaceSelector": {"matchLabels": {"team": "a"}}}
OPERATOR = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "octavo-system"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "octavo-operator"}},
}
PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}


def _service(**spec: Any) -> InferenceService:
    return read_service(stored(Case("", spec, name="llm")))


def _made(service: InferenceService, kind: str, settings: Settings = SETTINGS) -> dict[str, dict[str, Any]]:
    """Children of a kind by name."""
    return {c["metadata"]["name"]: c for c in desired_children(service, settings) if c["kind"] == kind}


def _container(deployment: dict[str, Any]) -> dict[str, Any]:
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    container: dict[str, Any] = found
    return container


def _ports(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_the_router_listens_on_its_admin_port() -> None:
    router = _container(_made(_service(), "Deployment")["llm-router"])
    assert _ports(router) == {"http": 8080, "admin": 8001}
    assert {"--port=8080", "--admin-port=8001"} <= {*router["args"]}


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_no_service_ingress_or_route_exposes_an_admin_port(case: Case) -> None:
    service = read_service(stored(case))
    for made in _made(service, "Service").values():
        assert [port["targetPort"] for port in made["spec"]["ports"]] == ["http"]
    for made in _made(service, "Ingress").values():
        paths = [path for rule in made["spec"]["rules"] for path in rule["http"]["paths"]]
        assert [path["backend"]["service"] for path in paths] == [{"name": service.name, "port": {"name": "http"}}]
    for made in _made(service, "HTTPRoute").values():
        assert [rule["backendRefs"] for rule in made["spec"]["rules"]] == [[{"name": service.name, "port": 80}]]


def test_probes_use_the_port_of_clients() -> None:
    router = _container(_made(_service(), "Deployment")["llm-router"])
    probes = [router[name]["httpGet"]["port"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == ["http"] * 3


@pytest.mark.parametrize("peers", [(), (CLIENTS,)], ids=["all clients", "some clients"])
def test_only_the_operator_and_prometheus_reach_the_admin_port(peers: tuple[dict[str, Any], ...]) -> None:
    policy = _made(_service(networkPolicy={"ingressFrom": [*peers]}), "NetworkPolicy")["llm-router"]
    by_port: dict[int, dict[str, Any]] = {}
    for rule in policy["spec"]["ingress"]:
        (port,) = rule["ports"]
        assert port["port"] not in by_port
        by_port[port["port"]] = rule
    assert by_port[8001]["from"] == [OPERATOR, PROMETHEUS]
    assert by_port[8080].get("from", []) == ([*peers, OPERATOR] if peers else [])
    assert set(by_port) == {8001, 8080}


def test_only_the_operator_reaches_the_admin_port_without_prometheus() -> None:
    policies = _made(_service(), "NetworkPolicy", replace(SETTINGS, scraped_from=()))
    (rule,) = [r for r in policies["llm-router"]["spec"]["ingress"] if r["ports"][0]["port"] == 8001]
    assert rule["from"] == [OPERATOR]


def test_pod_monitors_use_the_admin_port_of_routers() -> None:
    service = _service()
    monitors = _made(service, "PodMonitor")
    router = _container(_made(service, "Deployment")["llm-router"])
    engine = _container(desired_engine(service, SETTINGS, replicas=1))
    for name, port, container in (("llm-router", "admin", router), ("llm-engine", "http", engine)):
        (endpoint,) = monitors[name]["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == port
        assert port in _ports(container)


@pytest.mark.parametrize("spec", [{}, {"auth": KEYS}, {"exposure": HOST, "auth": OPEN}], ids=str)
def test_engines_require_the_routers_secret(spec: dict[str, Any]) -> None:
    engine = _container(desired_engine(_service(**spec), SETTINGS, replicas=1))
    assert "--router-only" in engine["args"]
    (secret,) = [variable["valueFrom"] for variable in engine["env"] if variable["name"] == "OCTAVO_ROUTER_SECRET"]
    assert secret == {"secretKeyRef": {"name": "llm-router-secret", "key": "secret"}}


def test_only_routers_have_the_admin_secret() -> None:
    router = desired_children(_service(), SETTINGS)
    (deployment,) = [child for child in router if child["kind"] == "Deployment"]
    assert mounted_secrets(deployment["spec"]["template"]) == {"llm-router-secret", "llm-router-admin-secret"}
    assert _secrets_of_engines(_service()) == {"llm-router-secret"}
    assert _secrets_of_engines(_service(router={"ref": {"name": "other"}})) == {"other-router-secret"}
    groups = _service(parallelism={"tensor": 2, "nodes": 2})
    assert _secrets_of_engines(groups) == {"llm-router-secret", "llm-group-secret"}


def _secrets_of_engines(service: InferenceService) -> set[str]:
    return mounted_secrets(engine_templates(desired_engine(service, SETTINGS, replicas=1))[0])


class FakeReports:
    """Records the addresses that `RouterReports` would connect to."""

    def __init__(self) -> None:
        self.addresses: list[tuple[str, int]] = []

    def subscribe(self, key: Key, address: tuple[str, int], secrets: Sequence[str]) -> None:
        self.addresses.append(address)
        self.secrets = [*secrets]


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "containerPort": number}


@pytest.mark.parametrize(
    ("containers", "port"),
    [
        ([{"name": "router", "ports": [_port("http", 8080), _port("admin", 8001)]}], 8001),
        ([{"name": "router", "ports": [_port("http", 8080)]}], 8080),
        (
            [
                {"name": "proxy", "ports": [_port("admin", 15000)]},
                {"name": "router", "ports": [_port("http", 8080), _port("admin", 8001)]},
                {"name": "agent"},
            ],
            8001,
        ),
    ],
    ids=["current version", "version without an admin port", "with injected containers"],
)
async def test_the_state_stream_uses_the_port_of_the_pod(containers: list[dict[str, Any]], port: int) -> None:
    """During an upgrade from a version without an admin port, both kinds of pods exist."""
    reports: Any = FakeReports()
    handlers = EventHandlers(View(), WorkQueue(), reports, secrets_of=lambda _: SECRETS, on_watch_start=lambda: None)
    labels = {SERVICE_LABEL: "llm", ROUTER_LABEL: "llm", COMPONENT_LABEL: "router"}
    pod: Any = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "llm-router-0", "namespace": "default", "uid": "u", "labels": labels},
        "spec": {"containers": containers},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    event: Any = {"type": "ADDED", "object": pod}
    await handlers._on_event(event, pod)
    assert reports.addresses == [("10.0.0.1", port)]
    assert reports.secrets == [SECRETS.admin, SECRETS.shared]
