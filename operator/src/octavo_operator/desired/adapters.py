"""The adapters of a service: a ConfigMap with the file that its engines follow, and its mount in their pods.

A change of the list changes the ConfigMap only. The kubelet updates the mounted file, and each engine then loads and
unloads adapters. Services without `spec.adapters` have none of this.
"""

import hashlib
import json
from collections.abc import Collection

from octavo_operator.desired.objects import Manifest, child
from octavo_operator.desired.weights import claim_location
from octavo_operator.names import ENGINE, adapters_config
from octavo_operator.service import InferenceService

ADAPTERS_PATH, ADAPTERS_FILE = "/etc/octavo/adapters", "adapters.json"
VOLUME = "adapters"
DIGEST_CHARS = 16


def desired_adapters(service: InferenceService, taken: Collection[str]) -> list[Manifest]:
    """The ConfigMap of the adapters; none without the field. `taken`: names that belong to other services."""
    if service.spec.adapters is None:
        return []
    data = {ADAPTERS_FILE: adapter_list(service, taken)}
    return [child(service, "v1", "ConfigMap", adapters_config(service.name), component=ENGINE, data=data)]


def adapter_list(service: InferenceService, taken: Collection[str]) -> str:
    """The content of the file."""
    listed = [adapter for adapter in service.spec.adapters or () if adapter.name not in taken]
    return json.dumps([{"name": a.name, "uri": claim_location(a.uri) if a.claim else a.uri} for a in listed])


def digest_of_list(content: str) -> str:
    """The digest by which engines report which content they follow."""
    return hashlib.sha256(content.encode()).hexdigest()[:DIGEST_CHARS]


def adapter_flags(service: InferenceService) -> list[str]:
    if service.spec.adapters is None:
        return []
    return ["--enable-lora", f"--lora-modules-file={ADAPTERS_PATH}/{ADAPTERS_FILE}"]


def adapter_volumes(service: InferenceService) -> list[Manifest]:
    if service.spec.adapters is None:
        return []
    return [{"name": VOLUME, "configMap": {"name": adapters_config(service.name)}}]


def adapter_mounts(service: InferenceService) -> list[Manifest]:
    if service.spec.adapters is None:
        return []
    return [{"name": VOLUME, "mountPath": ADAPTERS_PATH, "readOnly": True}]
