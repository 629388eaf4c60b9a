"""The claim for a model cache, once it exists: Kubernetes lets its size grow, and nothing else change.

A claim may be older than the spec, for example one that was retained when an earlier service was deleted. It is used as
it is, and a condition names the differences: the API server would refuse each write of other fields.
"""

from collections.abc import Mapping
from typing import Any

from octavo_operator.desired.objects import Manifest
from octavo_operator.desired.weights import DEFAULT_ACCESS
from octavo_operator.names import cache_claim
from octavo_operator.observed import Observed
from octavo_operator.plan.owner import is_ours
from octavo_operator.service import InferenceService
from octavo_operator.spec.quantity import parse_quantity

KIND = "PersistentVolumeClaim"
SHARED = "ReadWriteMany"


def live_claim(service: InferenceService, observed: Observed) -> Mapping[str, Any] | None:
    """Return the claim that the operator created for the service's cache; None if the spec or the cluster has none."""
    cache = service.spec.model.cache
    live = observed.children.get((KIND, cache_claim(service.name)))
    if cache is None or not cache.is_created or live is None or not is_ours(live, service):
        return None
    return live


def with_fixed_fields(manifest: Manifest, live: Mapping[str, Any]) -> Manifest:
    """Return the claim's manifest with the live claim's access modes, StorageClass and, if it is larger, size."""
    desired, fixed = manifest["spec"], live["spec"]
    spec = {**desired, "accessModes": fixed["accessModes"]}
    if "storageClassName" in desired and fixed.get("storageClassName") is not None:
        spec["storageClassName"] = fixed["storageClassName"]
    if _is_smaller(desired, fixed):
        spec["resources"] = {"requests": {"storage": fixed["resources"]["requests"]["storage"]}}
    return {**manifest, "spec": spec}


def differences(service: InferenceService, live: Mapping[str, Any]) -> list[str]:
    """Name each field of `model.cache` whose value the live claim does not have, with the claim's value."""
    cache, spec = service.spec.model.cache, live["spec"]
    if cache is None:
        return []
    modes, size = ", ".join(spec["accessModes"]), spec["resources"]["requests"]["storage"]
    has_other_class = cache.storage_class_name not in (None, spec.get("storageClassName"))
    differs = {
        f"cache.accessMode (the claim has {modes})": cache.access_mode not in (None, *spec["accessModes"]),
        f"cache.storageClassName (the claim has {spec.get('storageClassName')})": has_other_class,
        f"cache.size (the claim has {size})": _is_smaller({"resources": {"requests": {"storage": cache.size}}}, spec),
    }
    return [text for text, is_different in differs.items() if is_different]


def is_for_one_node(service: InferenceService, live: Mapping[str, Any] | None) -> bool:
    """Return whether only pods of one node can use the cache's claim. The operator knows the access modes of the claims
    that it creates; pods that can't attach another claim get the reason MountFailed.
    """
    cache = service.spec.model.cache
    if cache is None or not cache.is_created:
        return False
    modes = [cache.access_mode or DEFAULT_ACCESS] if live is None else live["spec"]["accessModes"]
    return SHARED not in modes


def _is_smaller(wanted: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    sizes = [parse_quantity(spec["resources"]["requests"]["storage"]) for spec in (wanted, fixed)]
    return sizes[0] is not None and sizes[1] is not None and sizes[0] < sizes[1]
