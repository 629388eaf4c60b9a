"""The API server's audit log with the writes of each account. Only the local cluster has one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

WRITES = ("create", "update", "patch", "delete", "deletecollection")


class Position(NamedTuple):
    """`offset`: over all files. `time`: RFC 3339. The effect of a call can be seen before its line is written, so lines
    of earlier calls may follow the offset."""

    offset: int
    time: str


@dataclass(frozen=True, slots=True)
class AuditLog:
    path: Path

    def files(self) -> list[Path]:
        """Files from the oldest: at 100 MB the API server starts a new file and adds the time to the old name."""
        return [*sorted(self.path.parent.glob(f"{self.path.stem}-*{self.path.suffix}")), self.path]

    def position(self) -> Position:
        """Current end of the log."""
        offset = sum(path.stat().st_size for path in self.files())
        return Position(offset, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}")

    def since(self, position: Position) -> Iterator[dict[str, Any]]:
        offset = position.offset
        for path in self.files():
            with path.open("rb") as file:
                file.seek(offset)
                events = map(json.loads, file)
                yield from (event for event in events if event["requestReceivedTimestamp"] >= position.time)
            offset = max(0, offset - path.stat().st_size)

    def writes(self, position: Position, account: str) -> list[str]:
        """Writes of a service account (NAMESPACE:NAME) except to Leases: verb, resource, namespace, name."""
        return [
            " ".join((event["verb"], *(event["objectRef"].get(k, "") for k in ("resource", "namespace", "name"))))
            for event in self.since(position)
            if event["user"]["username"] == f"system:serviceaccount:{account}"
            and event["verb"] in WRITES
            and event["objectRef"]["resource"] != "leases"
        ]
