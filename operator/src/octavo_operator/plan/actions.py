"""The actions of a plan. Each has its reason, and everything that the writer needs to execute it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of the operator's fields. `is_new`: no object of this name was observed; if one exists, it may
    belong to another owner. `repairs`: another client undid an earlier apply for this same spec.
    """

    manifest: Mapping[str, Any]
    reason: str
    is_new: bool = False
    repairs: bool = False


@dataclass(frozen=True, slots=True)
class CreateOnce:
    """Create the object if it is missing, and never change it: a Secret."""

    manifest: Mapping[str, Any]
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this uid if it is unchanged since it was observed. A Deployment's pods end gracefully."""

    kind: str
    name: str
    uid: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetGate:
    """Set the readiness gate of an engine pod. `epoch`: of the snapshot that the routers have; None closes the gate."""

    pod: str
    uid: str
    epoch: str | None
    reason: str


Action = Apply | CreateOnce | Delete | SetGate
