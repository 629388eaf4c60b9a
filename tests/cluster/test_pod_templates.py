"""Pods made from random pod templates, on a real API server that enforces the restricted Pod Security Standard."""

from typing import Any

import pytest
from kubernetes import client
from octavo_operator.desired.children import desired_children
from octavo_operator.desired.engine import desired_engine
from octavo_operator.names import ENGINE, ROUTER
from octavo_operator.service import Settings, read_service
from octavo_testing.infsvc_cases import Case, stored
from octavo_testing.pod_templates import NUM_TEMPLATES, random_template

SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
GROUP, VERSION, PLURAL = "serving.octavo.dev", "v1alpha1", "inferenceservices"
CHUNK = 20


@pytest.mark.usefixtures("crd")
@pytest.mark.parametrize("first", range(0, NUM_TEMPLATES, CHUNK))
def test_pods_of_valid_templates_are_restricted(api: client.ApiClient, strict_namespace: str, first: int) -> None:
    custom, core = client.CustomObjectsApi(api), client.CoreV1Api(api)
    for seed in range(first, first + CHUNK):
        templates = {ENGINE: random_template(seed, ENGINE), ROUTER: random_template(seed + NUM_TEMPLATES, ROUTER)}
        case = Case(str(seed), {name: {"podTemplate": template} for name, template in templates.items()})
        custom.create_namespaced_custom_object(
            GROUP, VERSION, strict_namespace, PLURAL, case.manifest(), dry_run="All", field_validation="Strict"
        )
        for pod in _pods(case):
            core.create_namespaced_pod(strict_namespace, pod, dry_run="All", field_validation="Strict")


def test_a_template_may_ask_for_privileges(api: client.ApiClient, strict_namespace: str) -> None:
    own = {"containers": [{"name": "debug", "image": "d", "securityContext": {"privileged": True}}]}
    pod, _ = _pods(Case("privileged", {"engine": {"podTemplate": {"spec": own}}}))
    with pytest.raises(client.ApiException, match="violates PodSecurity"):
        client.CoreV1Api(api).create_namespaced_pod(strict_namespace, pod, dry_run="All")


def _pods(case: Case) -> list[dict[str, Any]]:
    """The pods of engine and router, without the service accounts, which a dry run does not create."""
    service = read_service(stored(case))
    (router,) = [made for made in desired_children(service, SETTINGS) if made["kind"] == "Deployment"]
    pods = []
    for deployment in (desired_engine(service, SETTINGS, replicas=1), router):
        template = deployment["spec"]["template"]
        dropped = ("serviceAccountName", "priorityClassName")
        spec = {name: value for name, value in template["spec"].items() if name not in dropped}
        pods.append(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "p"}, "spec": spec}
        )
    return pods
