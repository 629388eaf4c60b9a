"""Parts that the manifests of all children share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo_operator.names import HTTP, ROUTER_LABEL, labels
from octavo_operator.service import InferenceService, Settings
from octavo_operator.spec.fields import Resources, SpecPart

Manifest = dict[str, Any]


def child(
    service: InferenceService, api_version: str, kind: str, name: str, *, component: str, **content: Any
) -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": service.namespace,
            "labels": labels(service.name, component),
            "ownerReferences": [service.owner],
        },
        **content,
    }


def pod_metadata(service: InferenceService, component: str) -> Manifest:
    """Labels and annotations of a pod. The user's labels can't replace the operator's."""
    metadata = service.spec.pod_metadata
    pod_labels = metadata.labels | labels(service.name, component) | {ROUTER_LABEL: service.router}
    return {"labels": pod_labels} | ({"annotations": dict(metadata.annotations)} if metadata.annotations else {})


def literal(args: Iterable[str]) -> list[str]:
    """Escape arguments: the kubelet takes `$$` for `$`, and `$(NAME)` for a variable."""
    return [arg.replace("$", "$$") for arg in args]


def with_expanded(args: Sequence[str], given: Sequence[str]) -> list[str]:
    """Arguments of older templates, not `literal`. `given`: the user's arguments, at the end of `args`."""
    return [*(arg.replace("$$", "$") for arg in args[: len(args) - len(given)]), *given]


def resources(given: Resources | None, default: Manifest | None = None) -> Manifest | None:
    """Resources of a container: `given` if it is set, otherwise the default."""
    return default if given is None else given.model_dump(exclude_defaults=True)


def dump_parts(parts: Iterable[SpecPart]) -> list[Manifest]:
    """Convert parts of the spec to the form that Kubernetes defines."""
    return [part.model_dump(by_alias=True, exclude_none=True) for part in parts]


def pull_secrets(service: InferenceService, settings: Settings) -> list[Manifest] | None:
    """References to pull Secrets, the installation's too, as its images may be in a registry of their own; None if
    there are none, so that the field is left out."""
    names = dict.fromkeys((*(ref.name for ref in service.spec.image_pull_secrets), *settings.image_pull_secrets))
    return [{"name": name} for name in names] or None


def drop_none(fields: Mapping[str, Any]) -> Manifest:
    return {name: value for name, value in fields.items() if value is not None}


#: User id of the user that Octavo's images have in /etc/passwd.
USER_ID = 10001

#: Security context of every container that the operator creates.
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def pod_security(settings: Settings) -> Manifest:
    """The pod security context that the Pod Security Standard "restricted" requires."""
    user = {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID} if settings.has_fixed_user else {}
    return {
        "runAsNonRoot": True,
        **user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


#: Makes Kubernetes use the end of the log if a failed container has no termination message; the operator shows it.
TERMINATION_MESSAGE_POLICY = "FallbackToLogsOnError"


def probe(path: str, *, period_s: int, failures: int) -> Manifest:
    """HTTP probe of the port that clients use: a pod that does not serve this port must receive no requests."""
    return {
        "httpGet": {"path": path, "port": HTTP},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
