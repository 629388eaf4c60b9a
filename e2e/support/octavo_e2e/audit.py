"""The API server's audit log with the writes of each account. Only the local cluster has one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITES = ("create", "update", "patch", "delete", "deletecollection")


@dataclass(frozen=True, slots=True)
class AuditLog:
    path: Path

    def files(self) -> list[Path]:
        """Files from the oldest: at 100 MB the API server starts a new file and adds the time to the old name."""
        return [*sorted(self.path.parent.glob(f"{self.path.stem}-*{self.path.suffix}")), self.path]

    def position(self) -> int:
        """Current end of the log, as an offset over all files."""
        return sum(path.stat().st_size for path in self.files())

    def since(self, position: int) -> Iterator[dict[str, Any]]:
        for path in self.files():
            with path.open("rb") as file:
                file.seek(position)
                for line in file:
                    yield json.loads(line)
            position = max(0, position - path.stat().st_size)

    def writes(self, position: int, account: str) -> list[str]:
        """Writes of a service account (NAMESPACE:NAME) except to Leases: verb, resource, namespace, name."""
        return [
            " ".join((event["verb"], *(event["objectRef"].get(k, "") for k in ("resource", "namespace", "name"))))
            for event in self.since(position)
            if event["user"]["username"] == f"system:serviceaccount:{account}"
            and event["verb"] in WRITES
            and event["objectRef"]["resource"] != "leases"
        ]
