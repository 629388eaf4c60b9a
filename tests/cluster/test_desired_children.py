"""A real API server accepts all children of a service, and a restricted namespace accepts its pods."""

import pytest
from kubernetes import client
from kubernetes.dynamic import DynamicClient
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import desired_engine, engine_templates
from octavo_operator.service import InferenceService, Settings, read_service
from octavo_testing.infsvc_cases import ACCEPTED, OPEN, Case, stored

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")


@pytest.fixture(scope="module")
def objects(api: client.ApiClient) -> DynamicClient:
    return DynamicClient(api)


def _service(case: Case, namespace: str) -> InferenceService:
    return read_service(stored(case, namespace=namespace))


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_the_api_server_accepts_all_children(objects: DynamicClient, strict_namespace: str, case: Case) -> None:
    """The suite in e2e/ applies LeaderWorkerSets."""
    service = _service(case, strict_namespace)
    engine = desired_engine(service, SETTINGS, replicas=1)
    for made in [*desired_children(service, SETTINGS), *[engine] * (engine["kind"] == "Deployment")]:
        kind = objects.resources.get(api_version=made["apiVersion"], kind=made["kind"])
        answer = kind.server_side_apply(made, field_manager="octavo-tests", dry_run="All")
        assert answer.metadata.name == made["metadata"]["name"]


@pytest.mark.parametrize("case", [c for c in ACCEPTED if "HostPath" not in str(c.spec)], ids=lambda case: case.id)
def test_pods_meet_the_restricted_standard(objects: DynamicClient, strict_namespace: str, case: Case) -> None:
    """Pods that mount a folder of the node are left out: the standard forbids them."""
    service, pods = _service(case, strict_namespace), objects.resources.get(api_version="v1", kind="Pod")
    routers = [made["spec"]["template"] for made in desired_children(service, SETTINGS) if made["kind"] == "Deployment"]
    for template in [*routers, *engine_templates(desired_engine(service, SETTINGS, replicas=1))]:
        spec = template["spec"]
        meta = {"name": "pod", "namespace": strict_namespace}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": _without_other_objects(spec)}
        assert pods.create(pod, dry_run="All").metadata.name == "pod"


def test_a_service_that_was_a_load_balancer_becomes_internal_again(
    objects: DynamicClient, strict_namespace: str
) -> None:
    """The API server allocates the node port, and removes it, as the operator never sets it."""
    kind = objects.resources.get(api_version="v1", kind="Service")
    types = []
    for router in ({"service": {"type": "LoadBalancer"}}, {}):
        service = _service(Case("", {"router": router, "auth": OPEN}, name="balanced"), strict_namespace)
        (made,) = [made for made in desired_children(service, SETTINGS) if made["metadata"]["name"] == "balanced"]
        del made["metadata"]["ownerReferences"]  # the garbage collector would find no such owner
        answer = kind.server_side_apply(made, field_manager="octavo-operator")
        (port,) = answer.spec.ports
        types.append((answer.spec.type, port.nodePort is not None))
    kind.delete("balanced", strict_namespace)
    assert types == [("LoadBalancer", True), ("ClusterIP", False)]


def _without_other_objects(spec: dict[str, object]) -> dict[str, object]:
    """Remove the account and the classes, which admission requires and which do not exist here."""
    return {k: v for k, v in spec.items() if k not in ("serviceAccountName", "runtimeClassName", "priorityClassName")}
