"""Fixtures of the tests that need a real API server: a client, the CRD of the repository, a namespace."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config, watch
from kubernetes.dynamic import DynamicClient
from octavo_testing.cluster import MISSING, kubeconfig
from octavo_testing.control_plane import GARBAGE, NAMESPACES, ControlPlane, control_plane, missing_tools
from urllib3.exceptions import HTTPError

CRD = Path(__file__).parents[2] / "crds" / "inferenceservices.serving.octavo.dev.yaml"
PATIENCE_S = 30


@pytest.fixture(scope="session")
def api() -> Iterator[client.ApiClient]:
    path = kubeconfig()
    if path is None:
        pytest.skip(MISSING)
    connected = config.new_client_from_config(str(path))
    try:
        client.VersionApi(connected).get_code(_request_timeout=PATIENCE_S)
    except HTTPError:
        pytest.skip(MISSING)
    yield connected
    connected.rest_client.pool_manager.clear()
    connected.close()


@pytest.fixture(scope="session")
def crd(api: client.ApiClient) -> str:
    """The name of the CRD, after the API server has established the repository's version."""
    manifest = yaml.safe_load(CRD.read_text())
    name: str = manifest["metadata"]["name"]
    crds = DynamicClient(api).resources.get(api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition")
    crds.server_side_apply(manifest, field_manager="octavo-tests", force_conflicts=True)
    reader = client.ApiextensionsV1Api(api)
    seen = watch.Watch().stream(
        reader.list_custom_resource_definition,
        field_selector=f"metadata.name={name}",
        timeout_seconds=PATIENCE_S,
        _request_timeout=PATIENCE_S,
    )
    for event in seen:
        conditions = event["object"].status.conditions or ()
        if any(c.type == "Established" and c.status == "True" for c in conditions):
            return name
    raise AssertionError(f"{name} was not established within {PATIENCE_S} s")


@pytest.fixture(scope="module")
def namespace(api: client.ApiClient) -> Iterator[str]:
    core, name = client.CoreV1Api(api), f"octavo-test-{secrets.token_hex(4)}"
    core.create_namespace({"metadata": {"name": name}}, _request_timeout=PATIENCE_S)
    yield name
    core.delete_namespace(name, _request_timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def strict_namespace(api: client.ApiClient) -> Iterator[str]:
    """A namespace that enforces the restricted Pod Security Standard."""
    core, name = client.CoreV1Api(api), f"octavo-test-{secrets.token_hex(4)}"
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    core.create_namespace({"metadata": {"name": name, "labels": level}})
    yield name
    core.delete_namespace(name)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane for the tests alone. They read its audit log; `plane.apiserver_down()` kills its API server."""
    if missing := missing_tools():
        pytest.skip(missing)
    controllers = (GARBAGE, NAMESPACES)
    with control_plane(tmp_path_factory.mktemp("plane"), audit=True, controllers=controllers) as running:
        yield running


@pytest.fixture
def plane_namespace(plane: ControlPlane) -> Iterator[str]:
    name = f"octavo-test-{secrets.token_hex(4)}"
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    plane.call("DELETE", f"/api/v1/namespaces/{name}")
