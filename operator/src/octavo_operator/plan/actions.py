"""The actions of a plan. Each has a reason for the log, and the data that the writer needs to execute it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of the operator's fields. `is_new`: no object of this name was observed; if one exists after
    all, it may belong to another owner. `repairs`: another client has undone an earlier apply of the same spec.
    """

    manifest: Mapping[str, Any]
    reason: str
    is_new: bool = False
    repairs: bool = False


@dataclass(frozen=True, slots=True)
class CreateOnce:
    """Create a Secret or a RoleBinding if it is missing, and never change it."""

    manifest: Mapping[str, Any]
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this uid if it is unchanged since it was observed. Pods of a Deployment end gracefully."""

    kind: str
    name: str
    uid: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetGate:
    """Open the readiness gate of an engine pod for the engine process `epoch`, or close it if `epoch` is None.
    `drains`: it is closed for a drain."""

    pod: str
    uid: str
    epoch: str | None
    reason: str
    drains: bool = False


@dataclass(frozen=True, slots=True)
class NotifyPod:
    """Annotate an engine pod with the digest of its list of adapters. When a pod changes, the kubelet updates its
    mounted ConfigMaps at once, otherwise within some 90 s."""

    pod: str
    uid: str
    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """Scale a Deployment or a LeaderWorkerSet whose other fields stay as they are."""

    kind: str
    name: str
    uid: str
    replicas: int
    reason: str


Action = Apply | CreateOnce | Delete | NotifyPod | SetGate | SetReplicas
