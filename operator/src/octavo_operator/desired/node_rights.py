"""Finds the fields of a spec that give a pod rights on its node.

The list follows the Pod Security Standard "baseline", and adds `nodeName`, `allowPrivilegeEscalation` and every added
capability. An installation with `podTemplates: restricted` refuses them, as the operator creates pods for users who may
be allowed to create services only.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo_operator.desired.objects import Manifest
from octavo_operator.service import InferenceService
from octavo_operator.spec.pod_template import PodTemplate

_POD_FIELDS = ("hostNetwork", "hostPID", "hostIPC", "nodeName")
_PROFILES = ("RuntimeDefault", "Localhost")
#: Field of a security context -> values that it may have. An empty value is always allowed.
_CONTEXT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "privileged": (),
    "allowPrivilegeEscalation": (),
    "capabilities.add": (),
    "procMount": ("Default",),
    "seLinuxOptions.type": ("container_t", "container_init_t", "container_kvm_t", "container_engine_t"),
    "seLinuxOptions.user": (),
    "seLinuxOptions.role": (),
    "windowsOptions.hostProcess": (),
    "seccompProfile.type": _PROFILES,
    "appArmorProfile.type": _PROFILES,
}
_SYSCTLS = (
    "kernel.shm_rmid_forced",
    *("net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_syncookies"),
)
#: The kubelet sends their requests, by default to the pod itself.
_HOOKS = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle.postStart", "lifecycle.preStop")
_APPARMOR, _APPARMOR_PROFILES = "container.apparmor.security.beta.kubernetes.io/", ("runtime/default", "localhost/")


def node_rights(service: InferenceService) -> list[str]:
    """Paths in `spec` of all fields that give an engine or router pod rights on its node."""
    spec = service.spec
    paths = [f"engine.podTemplate.{path}" for path in _of_template(spec.engine.pod_template)]
    paths += [f"router.podTemplate.{path}" for path in _of_template(spec.router.pod_template)]
    paths += [f"podMetadata.{path}" for path in _of_annotations(spec.pod_metadata.annotations)]
    cache = spec.model.cache
    return [*paths, "model.cache.hostPath"] if cache is not None and cache.mode == "HostPath" else paths


def _of_template(template: PodTemplate | None) -> Iterator[str]:
    if template is None:
        return
    pod: Manifest = template.manifest().get("spec", {})
    yield from (f"metadata.{path}" for path in _of_annotations(template.metadata.annotations))
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
    hosts = (f"{hook}.{kind}.host" for hook in _HOOKS for kind in ("httpGet", "tcpSocket"))
    yield from (f"{path}.{host}" for host in hosts if _value(container, host))


def _of_context(context: Any, path: str) -> Iterator[str]:
    """Yield the fields of a security context. A value of a wrong type is left to the API server, which refuses it."""
    for name, allowed in _CONTEXT_FIELDS.items():
        if (value := _value(context, name)) and value not in allowed:
            yield f"{path}.{name}"
    sysctls = _value(context, "sysctls")
    names = [_value(sysctl, "name") for sysctl in sysctls] if isinstance(sysctls, list) else []
    yield from (f"{path}.sysctls[{name}]" for name in names if name not in _SYSCTLS)


def _of_annotations(annotations: Mapping[str, str]) -> Iterator[str]:
    for name, value in annotations.items():
        if name.startswith(_APPARMOR) and not value.startswith(_APPARMOR_PROFILES):
            yield f"annotations[{name}]"


def _value(part: Any, path: str) -> Any:
    for name in path.split("."):
        part = part.get(name) if isinstance(part, Mapping) else None
    return part
