"""Notes on the fields of a spec that have no effect on one machine, so that none is ignored silently."""

from collections.abc import Iterator

from pydantic import BaseModel

from octavo_operator.service import InferenceService

_POD = "it places pods on nodes, and everything runs on this machine"
#: Field of the spec -> why it has no effect.
_IGNORED = {
    "parallelism.nodes": "all ranks of a replica run on this machine",
    "resources": "engines share this machine: nothing is reserved or limited",
    "sharedMemory": "processes use this machine's shared memory",
    "nodeSelector": _POD,
    "tolerations": _POD,
    "affinity": _POD,
    "topologySpreadConstraints": _POD,
    "priorityClassName": _POD,
    "runtimeClassName": "there are no containers here",
    "imagePullSecrets": "there are no images here",
    "engine.image": "the installed octavo is the engine",
    "engine.podTemplate": "there are no pods here",
    "engine.imagePullPolicy": "there are no images here",
    "model.cache": "models are in this machine's own caches",
    "model.prefetch": "the first engine fetches the model",
    "router.replicas": "one router runs; --router-args='--workers N' gives it several processes",
    "router.image": "the installed octavo is the router",
    "router.imagePullPolicy": "there are no images here",
    "router.resources": "nothing is reserved or limited",
    "router.extraArgs": "--router-args gives flags to the router",
    "router.env": "the router has the variables of this shell",
    "router.service": "the endpoint is at --host and --port",
    "router.podTemplate": _POD,
    "auth.limits": "--router-args='--tenants-file FILE' gives the router the file",
    "exposure": "the endpoint is at --host and --port",
    "disruptionBudget": "this machine is never drained",
    "networkPolicy": "engines listen on the loopback interface only, the router at --host",
    "podMetadata": "there are no pods here",
}


def ignored_field_notes(service: InferenceService) -> Iterator[str]:
    for path, text in _IGNORED.items():
        if _is_set(service.spec, path) and not (path == "router.replicas" and service.spec.router.replicas == 1):
            yield f"{service.name}: spec.{path} has no effect here: {text}"


def _is_set(spec: BaseModel, path: str) -> bool:
    part: BaseModel = spec
    *parents, last = path.split(".")
    for name in parents:
        value = getattr(part, _field(part, name))
        if not isinstance(value, BaseModel):
            return False
        part = value
    return _field(part, last) in part.model_fields_set


def _field(part: BaseModel, alias: str) -> str:
    return next(name for name, field in type(part).model_fields.items() if field.alias == alias)
