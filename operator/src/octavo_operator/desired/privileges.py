"""Finds the fields of a spec that give a pod rights on its node.

The list follows the Pod Security Standard "baseline". An installation with `podTemplates: restricted` refuses them, as
the operator creates pods for users who may be allowed to create services only.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo_operator.desired.objects import Manifest
from octavo_operator.service import InferenceService
from octavo_operator.spec.pod_template import PodTemplate

_POD_FIELDS = ("hostNetwork", "hostPID", "hostIPC", "nodeName")
_CONTEXT_FIELDS = ("privileged", "allowPrivilegeEscalation", "procMount", "seLinuxOptions", "sysctls")
_PROFILES = ("seccompProfile", "appArmorProfile")
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def privileges(service: InferenceService) -> list[str]:
    """Paths in `spec` of all fields that give an engine or router pod rights on its node."""
    spec = service.spec
    found = [f"engine.podTemplate.{path}" for path in _of_template(spec.engine.pod_template)]
    found += [f"router.podTemplate.{path}" for path in _of_template(spec.router.pod_template)]
    cache = spec.model.cache
    return [*found, "model.cache.hostPath"] if cache is not None and cache.mode == "HostPath" else found


def _of_template(template: PodTemplate | None) -> Iterator[str]:
    if template is None:
        return
    manifest = template.manifest()
    pod: Manifest = manifest.get("spec") or {}
    for name in (manifest.get("metadata") or {}).get("annotations") or {}:
        if name.startswith(_APPARMOR):
            yield f"metadata.annotations[{name}]"
    yield from (f"spec.{name}" for name in _POD_FIELDS if pod.get(name))
    yield from _of_context(pod.get("securityContext"), "spec.securityContext")
    for volume in pod.get("volumes", ()):
        if volume.get("hostPath") is not None:
            yield f"spec.volumes[{volume['name']}].hostPath"
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind, ()):
            yield from _of_container(container, f"spec.{kind}[{container['name']}]")


def _of_container(container: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from _of_context(container.get("securityContext"), f"{path}.securityContext")
    for port in container.get("ports", ()):
        if port.get("hostPort"):
            yield f"{path}.ports[{port['containerPort']}].hostPort"


def _of_context(context: Any, path: str) -> Iterator[str]:
    """Yield the fields of a security context. A value of a wrong type is left to the API server, which refuses it."""
    if not isinstance(context, Mapping):
        return
    yield from (f"{path}.{name}" for name in _CONTEXT_FIELDS if context.get(name))
    if _value(context, "capabilities", "add"):
        yield f"{path}.capabilities.add"
    if _value(context, "windowsOptions", "hostProcess"):
        yield f"{path}.windowsOptions.hostProcess"
    yield from (f"{path}.{name}" for name in _PROFILES if _value(context, name, "type") == "Unconfined")


def _value(context: Mapping[str, Any], name: str, field: str) -> Any:
    part = context.get(name)
    return part.get(field) if isinstance(part, Mapping) else None
