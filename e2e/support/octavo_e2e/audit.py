"""The API server's audit log: who wrote what, since when. Only the local cluster keeps one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITES = ("create", "update", "patch", "delete", "deletecollection")


@dataclass(frozen=True, slots=True)
class AuditLog:
    path: Path

    def position(self) -> int:
        """Where what comes next begins."""
        return self.path.stat().st_size

    def since(self, position: int) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as file:
            file.seek(position)
            for line in file:
                yield json.loads(line)

    def writes(self, position: int, account: str) -> list[str]:
        """Of a service account (NAMESPACE:NAME), its Lease apart: verb, resource, namespace, name."""
        return [
            " ".join((event["verb"], *(event["objectRef"].get(k, "") for k in ("resource", "namespace", "name"))))
            for event in self.since(position)
            if event["user"]["username"] == f"system:serviceaccount:{account}"
            and event["verb"] in WRITES
            and event["objectRef"]["resource"] != "leases"
        ]
