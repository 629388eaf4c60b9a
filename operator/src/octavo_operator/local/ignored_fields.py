"""What a spec says that one machine can't do, told in a line each rather than left out in silence."""

from collections.abc import Iterator

from pydantic import BaseModel

from octavo_operator.service import InferenceService

_POD = "placing pods is Kubernetes' affair: everything runs on this machine"
#: Field of the spec -> what becomes of it.
_MEANINGLESS = {
    "resources": "engines share what this machine has: nothing is reserved or limited",
    "sharedMemory": "processes use this machine's",
    "nodeSelector": _POD,
    "tolerations": _POD,
    "affinity": _POD,
    "topologySpreadConstraints": _POD,
    "priorityClassName": _POD,
    "runtimeClassName": "there are no containers here",
    "imagePullSecrets": "there are no images here",
    "engine.image": "the installed octavo is the engine",
    "engine.imagePullPolicy": "there are no images here",
    "model.cache": "models lie in this machine's own caches",
    "model.prefetch": "the first engine fetches",
    "router.replicas": "one router, with --router-args='--workers N' in several processes",
    "router.image": "the installed octavo is the router",
    "router.imagePullPolicy": "there are no images here",
    "router.resources": "nothing is reserved or limited",
    "router.podTemplate": _POD,
    "exposure": "the endpoint is this machine's, at --host and --port",
    "disruptionBudget": "nobody drains this machine",
    "networkPolicy": "engines listen on the loopback only, the router at --host",
    "podMetadata": "there are no pods here",
}


def ignored_field_notes(service: InferenceService) -> Iterator[str]:
    for path, text in _MEANINGLESS.items():
        if _is_set(service.spec, path) and not (path == "router.replicas" and service.spec.router.replicas == 1):
            yield f"{service.name}: spec.{path} has no effect here: {text}"


def _is_set(spec: BaseModel, path: str) -> bool:
    part: BaseModel = spec
    *parents, last = path.split(".")
    for name in parents:
        found = getattr(part, _field(part, name))
        if not isinstance(found, BaseModel):
            return False
        part = found
    return _field(part, last) in part.model_fields_set


def _field(part: BaseModel, alias: str) -> str:
    return next(name for name, field in type(part).model_fields.items() if field.alias == alias)
