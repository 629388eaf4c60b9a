"""Merges a `podTemplate` of a spec into a pod that the operator makes, as a strategic merge patch does.

Objects are merged field by field, and lists whose items have a natural key by that key. All else is replaced. What the
operator itself needs can't be replaced: `conflicts` names such fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo_operator.desired.objects import Manifest
from octavo_operator.spec.engine import KEY_VARIABLE
from octavo_operator.spec.pod_template import PodTemplate

#: List -> field that identifies an item in it.
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
#: Lists whose items are merged, too; items of other lists replace those with the same key.
_DEEP = ("containers", "initContainers")
#: Lists without a key to which items are added.
_APPENDED = ("envFrom",)
#: Security context of added containers that have none, as the Pod Security Standard "restricted" requires.
_RESTRICTED: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_OWN_POD_FIELDS = ("readinessGates", "restartPolicy", "terminationGracePeriodSeconds")
_OWN_CONTAINER_FIELDS = (
    *("args", "command", "image", "imagePullPolicy", "startupProbe", "readinessProbe", "livenessProbe"),
    *("terminationMessagePath", "terminationMessagePolicy"),
)
_RESERVED_ENV = ("OCTAVO_", KEY_VARIABLE)


def with_template(pod: Manifest, template: PodTemplate | None) -> Manifest:
    """Merge `template` into `pod`, both with `metadata` and `spec`."""
    return pod if template is None else _merge(pod, template.manifest())


def conflicts(pod: Manifest, template: PodTemplate | None) -> list[str]:
    """Paths of the fields by which `template` would replace the operator's own parts of `pod`."""
    if template is None:
        return []
    spec: Manifest = template.manifest().get("spec", {})
    paths = [f"spec.{name}" for name in _OWN_POD_FIELDS if name in spec]
    paths += _same(pod["spec"], spec, "volumes", "spec")
    for kind in _DEEP:
        own = {container["name"]: container for container in pod["spec"].get(kind, ())}
        for container in spec.get(kind, ()):
            if container["name"] in own:
                paths += _container_conflicts(own[container["name"]], container, f"spec.{kind}[{container['name']}]")
    return paths


def _container_conflicts(own: Manifest, given: Manifest, path: str) -> Iterator[str]:
    yield from (f"{path}.{name}" for name in _OWN_CONTAINER_FIELDS if name in given)
    yield from _same(own, given, "ports", path)
    yield from _same(own, given, "volumeMounts", path)
    reserved = [variable["name"] for variable in given.get("env", ()) if variable["name"].startswith(_RESERVED_ENV)]
    yield from (f"{path}.env[{name}]" for name in reserved)


def _same(own: Manifest, given: Manifest, name: str, path: str) -> list[str]:
    """Items of the list `name` that both have."""
    taken = {_key(name, item) for item in own.get(name) or ()}
    return [f"{path}.{name}[{item[KEYS[name]]}]" for item in given.get(name, ()) if _key(name, item) in taken]


def _key(name: str, item: Manifest) -> Any:
    """Value that identifies the item in the list `name`. A port number may be used once by each protocol."""
    value = item[KEYS[name]]
    return (value, item.get("protocol") or "TCP") if name == "ports" else value


def _merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Manifest:
    merged = dict(ours)
    for name, value in theirs.items():
        own = ours.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            merged[name] = _merge(own, value)
        elif name in KEYS and isinstance(value, list | tuple):  # a label may have the name of such a list
            merged[name] = _merge_lists(name, own or [], value)
        elif name in _APPENDED and isinstance(value, list | tuple):
            merged[name] = [*(own or []), *value]
        else:
            merged[name] = value
    return merged


def _merge_lists(name: str, ours: Sequence[Manifest], theirs: Sequence[Manifest]) -> list[Manifest]:
    merged = {_key(name, item): item for item in ours}
    for item in theirs:
        key = _key(name, item)
        own = merged.get(key)
        if name not in _DEEP:
            merged[key] = item
        elif own is None:
            merged[key] = {"securityContext": _RESTRICTED} | item
        else:
            merged[key] = _merge(own, item)
    return list(merged.values())
