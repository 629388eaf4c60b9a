"""`AuditLog`: who asked an API server for what, from its own audit log."""

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

POLICY = json.dumps(
    {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata"}],
    }
)
LONGEST_LINE = 1 << 20  # bytes
READS = frozenset({"get", "list", "watch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`resource`: its plural with the subresource, as RBAC has it. `namespace`: empty for the whole cluster."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    path: str
    code: int
    is_allowed: bool  # by the authorizer; admission may still refuse it, in a namespace that ends
    asked_s: float
    answered_s: float

    @property
    def is_write(self) -> bool:
        return self.verb not in READS


class AuditLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def mark(self) -> int:
        """For `calls(since=...)`: the end of the last whole line. It is written before the caller gets its answer."""
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, size - LONGEST_LINE))
            return begin + file.read(size - begin).rfind(b"\n") + 1

    def calls(self, *, since: int = 0, user: str = "") -> list[Call]:
        """Those that have ended, and watches when they begin. `user`: whose name ends so."""
        with self.path.open("rb") as file:
            file.seek(since)
            lines = [line for line in file if line.endswith(b"\n")]
        made = (_call(event) for event in map(json.loads, lines) if _counts(event))
        return [call for call in made if call.user.endswith(user)]


def _counts(event: dict[str, Any]) -> bool:
    """A watch is written twice: when it begins to answer, and when it ends."""
    return bool(event["stage"] == ("ResponseStarted" if event["verb"] == "watch" else "ResponseComplete"))


def _call(event: dict[str, Any]) -> Call:
    ref = event.get("objectRef", {})
    return Call(
        user=event["user"].get("username", ""),
        verb=event["verb"],
        group=ref.get("apiGroup", ""),
        resource="/".join(filter(None, (ref.get("resource", ""), ref.get("subresource", "")))),
        namespace=ref.get("namespace", ""),
        name=ref.get("name", ""),
        path=event["requestURI"],
        code=event.get("responseStatus", {}).get("code", 0),
        is_allowed=event.get("annotations", {}).get("authorization.k8s.io/decision") != "forbid",
        asked_s=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
        answered_s=datetime.fromisoformat(event["stageTimestamp"]).timestamp(),
    )
