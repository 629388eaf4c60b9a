"""`Right`s that roles grant, that an audit log shows in use, and that docs/reference/rbac.md documents."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from octavo_testing.audit_log import Call

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "rbac.md"


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One verb on one resource. `group`: empty for the core group."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


def granted_rights(rules: Iterable[Mapping[str, Any]]) -> set[Right]:
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used_rights(calls: Iterable[Call]) -> set[Right]:
    """Return the rights that allowed calls used. An apply that created an object used the right to create, too."""
    rights = set()
    for call in calls:
        if call.resource and call.is_allowed:
            rights.add(Right(call.group, call.resource, call.verb))
            if call.verb == "patch" and call.code == HTTPStatus.CREATED:
                rights.add(Right(call.group, call.resource, "create"))
    return rights


def refused_calls(calls: Iterable[Call]) -> list[Call]:
    return [call for call in calls if not call.is_allowed]


def documented_rights(role: str) -> dict[Right, str]:
    """Return each right under the heading `role`, with the reason why no test exercises it, or an empty string."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (rows,) = [part for part in section if part.startswith(f"{role}\n")]
    found: dict[Right, str] = {}
    for line in rows.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or not cells[0].startswith("`"):
            continue
        for resource in cells[0].replace("`", "").split(", "):
            name, _, group = resource.partition(".")
            reasons = dict(re.findall(r"`(\w+)`: ([^;]+)", cells[2]))
            verbs = re.findall(r"`(\w+)`", cells[1])
            assert reasons.keys() <= set(verbs), line
            found |= {Right(group, name, verb): reasons.get(verb, "") for verb in verbs}
    return found
