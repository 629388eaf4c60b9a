"""The operator against a real API server: children, repairs, and fields that it leaves alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from octavo_testing.cluster import kubeconfig
from octavo_testing.infsvc_cases import Case

GROUP, VERSION, PLURAL = "serving.octavo.dev", "v1alpha1", "inferenceservices"
PATIENCE_S = 60

pytestmark = pytest.mark.usefixtures("crd")


@pytest.fixture(scope="module")
def operator(namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of an operator that runs outside the cluster, for one namespace."""
    folder = tmp_path_factory.mktemp("operator")
    (folder / "key").write_text("a key")
    log = folder / "log"
    flags = {
        "namespace": namespace,
        "lease-namespace": namespace,
        "engine-image": "octavo.invalid/engine:1",
        "router-image": "octavo.invalid/router:1",
        "image-pull-policy": "Never",
        "key-file": str(folder / "key"),
        "log-format": "text",
        "liveness": "http://127.0.0.1:0/healthz",
    }
    command = [sys.executable, "-m", "octavo_operator.main", *(f"--{name}={value}" for name, value in flags.items())]
    env = os.environ | {"KUBECONFIG": str(kubeconfig())}
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=env) as process:
        yield log
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENCE_S)


@pytest.fixture
def custom(api: client.ApiClient) -> client.CustomObjectsApi:
    return client.CustomObjectsApi(api)


@pytest.fixture
def create(custom: client.CustomObjectsApi, namespace: str) -> Iterator[Callable[..., str]]:
    made: list[str] = []

    def make(name: str, **spec: Any) -> str:
        custom.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, Case("", spec, name=name).manifest())
        made.append(name)
        return name

    yield make
    for name in made:
        custom.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)


def _until(
    custom: client.CustomObjectsApi, namespace: str, name: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until the status satisfies `holds`; return the service, or fail with its last state."""
    last: dict[str, Any] = {}
    seen = watch.Watch().stream(
        custom.list_namespaced_custom_object,
        GROUP,
        VERSION,
        namespace,
        PLURAL,
        field_selector=f"metadata.name={name}",
        timeout_seconds=PATIENCE_S,
    )
    for event in seen:
        last = event["object"]
        if holds(last.get("status", {})):
            return last
    raise AssertionError(f"not within {PATIENCE_S} s: {last}")


def _reason(status: dict[str, Any], type_: str) -> str:
    return next((c["reason"] for c in status.get("conditions", ()) if c["type"] == type_), "")


def test_children_are_created_and_their_trouble_is_reported(
    operator: Path, custom: client.CustomObjectsApi, api: client.ApiClient, namespace: str, create: Callable[..., str]
) -> None:
    name = create("made")
    found = _until(custom, namespace, name, lambda status: _reason(status, "Ready") == "ImagePullError")
    assert found["status"]["replicas"]["summary"] == "0/1"
    assert found["status"]["url"] == f"http://made.{namespace}.svc.cluster.local"
    deployments = (
        client.AppsV1Api(api)
        .list_namespaced_deployment(namespace, label_selector=f"serving.octavo.dev/service={name}")
        .items
    )
    assert {d.metadata.name.rsplit("-", 1)[0] for d in deployments} == {"made-engine", "made"}
    assert "applies Deployment made-router" in operator.read_text()


def test_drift_is_repaired_and_foreign_fields_stay(
    operator: Path, custom: client.CustomObjectsApi, api: client.ApiClient, namespace: str, create: Callable[..., str]
) -> None:
    name, core = create("drift"), client.CoreV1Api(api)
    _until(custom, namespace, name, lambda status: bool(_reason(status, "Ready")))
    first = core.read_namespaced_service(name, namespace)
    change = {"metadata": {"annotations": {"team": "a"}}, "spec": {"selector": {"serving.octavo.dev/router": "wrong"}}}
    core.patch_namespaced_service(name, namespace, change)
    seen = watch.Watch().stream(
        core.list_namespaced_service, namespace, field_selector=f"metadata.name={name}", timeout_seconds=PATIENCE_S
    )
    repaired = next(e["object"] for e in seen if _is_repaired(e["object"]))
    assert repaired.metadata.uid == first.metadata.uid
    core.delete_namespaced_service(name, namespace)
    seen = watch.Watch().stream(
        core.list_namespaced_service, namespace, field_selector=f"metadata.name={name}", timeout_seconds=PATIENCE_S
    )
    assert next(e["object"] for e in seen if e["object"].metadata.uid != first.metadata.uid)


def _is_repaired(service: Any) -> bool:
    is_ours: bool = service.spec.selector["serving.octavo.dev/router"] == "drift"
    return is_ours and service.metadata.annotations.get("team") == "a"


def test_applying_the_same_manifest_again_changes_nothing(
    operator: Path, custom: client.CustomObjectsApi, api: client.ApiClient, namespace: str, create: Callable[..., str]
) -> None:
    name = create("same", replicas=0)
    settled = _until(custom, namespace, name, lambda status: _reason(status, "ReplicasAdmitted") == "NoReplicas")
    lines = operator.read_text().count(f"{namespace}/{name}: applies")
    kind = DynamicClient(api).resources.get(api_version=f"{GROUP}/{VERSION}", kind="InferenceService")
    again = Case("", {"replicas": 0}, name=name).manifest()
    kind.server_side_apply(again, namespace=namespace, name=name, field_manager="another", force_conflicts=True)
    create("marker", replicas=0)
    _until(custom, namespace, "marker", lambda status: _reason(status, "ReplicasAdmitted") == "NoReplicas")
    assert operator.read_text().count(f"{namespace}/{name}: applies") == lines
    assert settled["metadata"]["generation"] == 1


def test_a_shared_router_that_is_missing_is_named(
    operator: Path, custom: client.CustomObjectsApi, api: client.ApiClient, namespace: str, create: Callable[..., str]
) -> None:
    name = create("sharing", router={"ref": {"name": "missing"}})
    _until(custom, namespace, name, lambda status: _reason(status, "Ready") == "RouterNotFound")
    with pytest.raises(ApiException):
        client.CoreV1Api(api).read_namespaced_service(name, namespace)


def test_a_shared_router_that_is_not_for_a_service_is_named(
    operator: Path, custom: client.CustomObjectsApi, api: client.ApiClient, namespace: str, create: Callable[..., str]
) -> None:
    owner = create("guarded", replicas=0, router={"allowFrom": ["friend"]})
    friend, stranger = (create(name, replicas=0, router={"ref": {"name": owner}}) for name in ("friend", "stranger"))
    _until(custom, namespace, stranger, lambda status: _reason(status, "Ready") == "RouterNotAllowed")
    _until(custom, namespace, friend, lambda status: _reason(status, "Accepted") == "Valid")
    with pytest.raises(ApiException):
        client.CoreV1Api(api).read_namespaced_service(stranger, namespace)
