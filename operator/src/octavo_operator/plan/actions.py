"""What a plan can ask for. Each action says why; whoever carries one out adds nothing of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of our fields. `is_new`: nothing of this name was observed, and if there is something after
    all, it may not be ours to change. `repairs`: somebody else undid what was applied for this very spec.
    """

    manifest: Mapping[str, Any]
    reason: str
    is_new: bool = False
    repairs: bool = False


@dataclass(frozen=True, slots=True)
class CreateOnce:
    """Made if it isn't there, never changed: a secret that is drawn when it is made."""

    manifest: Mapping[str, Any]
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Only the object with this uid, unchanged since it was observed; pods of a Deployment end gracefully."""

    kind: str
    name: str
    uid: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetGate:
    """The readiness gate of an engine pod; `epoch`: of the engine whose snapshot the routers have, None to close it."""

    pod: str
    uid: str
    epoch: str | None
    reason: str


Action = Apply | CreateOnce | Delete | SetGate
