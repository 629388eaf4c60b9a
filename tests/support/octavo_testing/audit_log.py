"""`AuditLog` reads the calls that users made to an API server from the server's audit log."""

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
    """`resource` is the plural with the subresource, as in RBAC rules; `namespace` is empty for cluster-wide calls."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str
    name: str
    path: str
    code: int
    is_allowed: bool  # by the authorizer; admission may still refuse the call, in a namespace that is being deleted
    asked_s: float
    answered_s: float

    @property
    def is_write(self) -> bool:
        return self.verb not in READS


class AuditLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def mark(self) -> int:
        """Return the end of the log, for `calls(since=...)`. A call is logged before its caller gets a response."""
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, size - LONGEST_LINE))
            return begin + file.read(size - begin).rfind(b"\n") + 1

    def calls(self, *, since: int = 0, user: str = "") -> list[Call]:
        """Return the finished calls and started watches after `since`, of users whose name ends with `user`."""
        with self.path.open("rb") as file:
            file.seek(since)
            lines = [line for line in file if line.endswith(b"\n")]
        made = (_call(event) for event in map(json.loads, lines) if _counts(event))
        return [call for call in made if call.user.endswith(user)]


def _counts(event: dict[str, Any]) -> bool:
    """Count each call once: the log has a watch twice, at the start of its response and at its end."""
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
