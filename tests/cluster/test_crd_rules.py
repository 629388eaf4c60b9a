"""The CRD on a real API server: accepted specs, refused specs with their messages, defaults."""

import json
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from octavo_testing.infsvc_cases import ACCEPTED, REFUSED, Case

GROUP, VERSION, PLURAL = "serving.octavo.dev", "v1alpha1", "inferenceservices"

pytestmark = pytest.mark.usefixtures("crd")


@pytest.fixture
def custom(api: client.ApiClient) -> client.CustomObjectsApi:
    return client.CustomObjectsApi(api)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.id)
def test_a_valid_spec_is_accepted(custom: client.CustomObjectsApi, namespace: str, case: Case) -> None:
    assert _create(custom, namespace, case)["spec"]["model"] == case.manifest()["spec"]["model"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_an_invalid_spec_is_refused_with_the_remedy(
    custom: client.CustomObjectsApi, namespace: str, case: Case
) -> None:
    with pytest.raises(ApiException) as refusal:
        _create(custom, namespace, case)
    assert refusal.value.status in (400, 422)
    assert case.message in json.loads(refusal.value.body)["message"]


CLAIM = {"mode": "PVC", "size": "40Gi", "storageClassName": "fast"}


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (CLAIM | {"size": "80Gi", "accessMode": "ReadWriteOnce"}, ""),
        (CLAIM | {"size": "40960Mi"}, ""),
        ({"mode": "EmptyDir", "size": "1Gi"}, ""),
        ({"mode": "PVC", "claimName": "mine"}, ""),
        (CLAIM | {"size": "10Gi"}, "cache.size of an existing claim can't shrink"),
        (CLAIM | {"accessMode": "ReadWriteMany"}, "cache.accessMode of an existing claim can't change"),
        (CLAIM | {"storageClassName": "slow"}, "cache.storageClassName of an existing claim can't change"),
        ({"mode": "PVC", "size": "40Gi"}, "cache.storageClassName of an existing claim can't change"),
        (CLAIM | {"storageClassName": ""}, "cache.storageClassName of an existing claim can't change"),
    ],
    ids=str,
)
def test_fields_of_an_existing_claim_cannot_change(
    custom: client.CustomObjectsApi, namespace: str, cache: dict[str, Any], message: str
) -> None:
    def manifest(cache: dict[str, Any]) -> dict[str, Any]:
        return Case("", {"model": {"uri": "hf://Qwen/Qwen3-0.6B", "cache": cache}}).manifest()

    created = custom.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, manifest(CLAIM))
    edited = manifest(cache) | {"metadata": created["metadata"]}
    try:
        custom.replace_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, "case", edited)
        refusal = ""
    except ApiException as error:
        refusal = json.loads(error.body)["message"]
    finally:
        custom.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, "case")
    assert bool(refusal) is bool(message)
    assert message in refusal


def test_a_new_service_can_be_scaled(custom: client.CustomObjectsApi, namespace: str) -> None:
    created = custom.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, Case("x", {}).manifest())
    scale = custom.patch_namespaced_custom_object_scale(
        GROUP, VERSION, namespace, PLURAL, created["metadata"]["name"], {"spec": {"replicas": 3}}
    )
    assert created["spec"]["replicas"] == 1
    assert scale["spec"]["replicas"] == 3


def _create(custom: client.CustomObjectsApi, namespace: str, case: Case) -> dict[str, Any]:
    """Create the service in a dry run."""
    created: dict[str, Any] = custom.create_namespaced_custom_object(
        GROUP, VERSION, namespace, PLURAL, case.manifest(), dry_run="All", field_validation="Strict"
    )
    return created
