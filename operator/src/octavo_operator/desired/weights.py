"""Manifest parts that give an engine pod its weights: volumes, the init container that fetches, the engine's argument.

An init container with its own resources fetches remote models into the cache volume, where the engine looks for them.
A model on a PersistentVolumeClaim is mounted read-only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_operator.desired.objects import (
    CONTAINER_SECURITY,
    TERMINATION_MESSAGE_POLICY,
    Manifest,
    child,
    drop_none,
    dump_parts,
    literal,
    resources,
)
from octavo_operator.names import ENGINE, cache_claim
from octavo_operator.service import InferenceService, Settings
from octavo_operator.spec.model import claim_name

CACHE_PATH = "/var/cache/octavo"
CLAIM_PATH = "/models"
#: Environment variables that put the Hugging Face cache and Octavo's own cache into the mounted folder.
CACHE_VARIABLES: list[Manifest] = [
    {"name": "XDG_CACHE_HOME", "value": CACHE_PATH},
    {"name": "HF_HOME", "value": f"{CACHE_PATH}/huggingface"},
]
FETCHED = ("hf", "ms", "s3", "gs", "az", "azure")
DEFAULT_ACCESS = "ReadWriteOnce"  # every StorageClass supports it; pods of one node share the claim
#: Downloads from the Hugging Face Hub take up to about 4 GB for files of many GB (huggingface_hub#3300).
DEFAULT_PREFETCH: Manifest = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSource:
    model: str  # the argument of `octavo serve`
    volumes: tuple[Manifest, ...]
    mounts: tuple[Manifest, ...]
    init_containers: tuple[Manifest, ...]


def weights_of(service: InferenceService, settings: Settings) -> WeightsSource:
    model, cache = service.spec.model, _cache_volume(service)
    cache_mount: Manifest = {"name": "cache", "mountPath": CACHE_PATH}
    if model.scheme == "pvc":
        volume = {"name": "model", "persistentVolumeClaim": {"claimName": claim_name(model.uri), "readOnly": True}}
        mount = {"name": "model", "mountPath": CLAIM_PATH, "readOnly": True}
        location = claim_location(model.uri)
        return WeightsSource(model=location, volumes=(cache, volume), mounts=(cache_mount, mount), init_containers=())
    fetching = (_prefetch(service, settings, cache_mount),) if model.scheme in FETCHED else ()
    return WeightsSource(model=model.uri, volumes=(cache,), mounts=(cache_mount,), init_containers=fetching)


def claim_location(uri: str) -> str:
    """Path in the engine's container of a pvc:// location on the claim of the model."""
    _, _, path = uri.removeprefix("pvc://").partition("/")
    return f"{CLAIM_PATH}/{path}".rstrip("/")


def desired_claim(service: InferenceService) -> list[Manifest]:
    """The PersistentVolumeClaim for the cache, if the spec asks the operator to create it (mode PVC with a size). A
    claim that outlives the service has no owner; its labels show whose it is."""
    cache = service.spec.model.cache
    if cache is None or not cache.is_created:
        return []
    spec = drop_none(
        {
            "accessModes": [cache.access_mode or DEFAULT_ACCESS],
            "storageClassName": cache.storage_class_name,
            "resources": {"requests": {"storage": cache.size}},
        }
    )
    claim = child(service, "v1", "PersistentVolumeClaim", cache_claim(service.name), component=ENGINE, spec=spec)
    if cache.retention_policy == "Retain":
        del claim["metadata"]["ownerReferences"]
    return [claim]


def with_users_variables(service: InferenceService, ours: Sequence[Manifest]) -> list[Manifest]:
    """Environment variables of a container: ours, without those that `engine.env` replaces, and all of `engine.env`.

    A variable may refer to earlier ones, so these stay in their order. The init container has them, too, so that the
    engine looks where it has written.
    """
    given = dump_parts(service.spec.engine.env)
    names = {variable["name"] for variable in given}
    return [*(variable for variable in ours if variable["name"] not in names), *given]


def secret_environment(service: InferenceService) -> list[Manifest]:
    ref = service.spec.model.secret_ref
    return [] if ref is None else [{"secretRef": {"name": ref.name}}]


def _cache_volume(service: InferenceService) -> Manifest:
    cache = service.spec.model.cache
    if cache is None or cache.mode == "EmptyDir":
        limit = {} if cache is None or cache.size is None else {"sizeLimit": cache.size}
        return {"name": "cache", "emptyDir": limit}
    if cache.mode == "HostPath":
        return {"name": "cache", "hostPath": {"path": cache.host_path, "type": "Directory"}}
    claim = cache.claim_name or cache_claim(service.name)
    return {"name": "cache", "persistentVolumeClaim": {"claimName": claim}}


def _prefetch(service: InferenceService, settings: Settings, cache_mount: Manifest) -> Manifest:
    model, engine = service.spec.model, service.spec.engine
    own = None if model.prefetch is None else model.prefetch.resources
    container: dict[str, Any] = {
        "name": "fetch",
        "image": engine.image or settings.engine_image,
        "imagePullPolicy": engine.image_pull_policy or settings.image_pull_policy,
        "args": literal(["fetch", model.uri, *([] if model.revision is None else ["--revision", model.revision])]),
        "env": with_users_variables(service, CACHE_VARIABLES),
        "envFrom": secret_environment(service) or None,
        "resources": resources(own, DEFAULT_PREFETCH),
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": TERMINATION_MESSAGE_POLICY,
        "volumeMounts": [cache_mount, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return drop_none(container)
