"""The chart registers the metrics API unless its values or an API of another project forbid it."""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from octavo_testing.chart import CHART, HELM_MISSING, helm_binary, render, run_helm
from octavo_testing.control_plane import ControlPlane
from octavo_testing.metrics_api import API_SERVICES

pytestmark = pytest.mark.skipif(helm_binary() is None, reason=HELM_MISSING)

GROUP, SYSTEM = "custom.metrics.k8s.io", "octavo-system"
OURS = {"namespace": SYSTEM, "name": "octavo-metrics-api", "port": 443}
#: Every part that belongs to the metrics API: objects, rights and flags.
PARTS = {"APIService", "Service", "RoleBinding", "HorizontalPodAutoscalers", "--metrics-api-port", "authority's Secret"}

Objects = list[dict[str, Any]]


def _parts(made: Objects) -> set[str]:
    rules = [rule for one in made for rule in one.get("rules", ())]
    names = {(one["kind"], one["metadata"]["name"]) for one in made}
    found = {kind for kind in ("Service", "RoleBinding") if (kind, OURS["name"]) in names}
    if ("APIService", f"v1beta2.{GROUP}") in names:
        found.add("APIService")
    if any("horizontalpodautoscalers" in rule["resources"] for rule in rules):
        found.add("HorizontalPodAutoscalers")
    if any(OURS["name"] in rule.get("resourceNames", ()) for rule in rules):
        found.add("authority's Secret")
    (deployment,) = [one for one in made if one["kind"] == "Deployment"]
    if "--metrics-api-port" in str(deployment["spec"]["template"]):
        found.add("--metrics-api-port")
    return found


@pytest.mark.parametrize(
    ("values", "is_registered"),
    [
        ({}, True),
        ({"operator": {"replicas": 1}}, True),
        ({"operator": {"replicas": 0}}, False),
        ({"watchNamespaces": ["team"]}, False),
        ({"metricsApi": {"enabled": False}}, False),
    ],
    ids=str,
)
def test_values_decide_where_the_cluster_is_not_seen(values: Mapping[str, Any], is_registered: bool) -> None:
    assert _parts(render(values)) == (PARTS if is_registered else set())


@pytest.mark.parametrize(
    ("registered", "is_ours"),
    [
        pytest.param({}, True, id="of no project"),
        pytest.param({"v1beta2": OURS}, True, id="of this release"),
        pytest.param({"v1beta1": {"namespace": "monitoring", "name": "adapter"}}, False, id="another version"),
        pytest.param({"v1beta2": {"namespace": "monitoring", "name": "adapter"}}, False, id="the same version"),
        pytest.param({"v1beta2": OURS | {"namespace": "other"}}, False, id="of another release"),
        pytest.param(
            {"v1beta2": OURS, "v1beta1": {"namespace": "x", "name": "y"}},
            False,
            id="of this release and another",
        ),
    ],
)
def test_an_api_of_another_project_is_left_to_it(
    plane: ControlPlane, registered: Mapping[str, Mapping[str, Any]], is_ours: bool
) -> None:
    for number, (version, service) in enumerate(registered.items(), start=1):
        spec = {"group": GROUP, "version": version, "service": service, "insecureSkipTLSVerify": True}
        spec |= {"groupPriorityMinimum": 100, "versionPriority": number}
        plane.call("POST", API_SERVICES, {"metadata": {"name": f"{version}.{GROUP}"}, "spec": spec})
    try:
        command = ("template", "octavo", str(CHART), "--namespace", SYSTEM, "--dry-run=server")
        made = run_helm(*command, kubeconfig=plane.kubeconfig())
    finally:
        for version in registered:
            plane.call("DELETE", f"{API_SERVICES}/{version}.{GROUP}")
    assert made.returncode == 0, made.stderr
    assert _parts([one for one in yaml.safe_load_all(made.stdout) if one]) == (PARTS if is_ours else set())
