"""What roles allow, what an audit log shows to be used, what docs/reference/rbac.md says of it: all as `Right`s."""

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


def granted(rules: Iterable[Mapping[str, Any]]) -> set[Right]:
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(calls: Iterable[Call]) -> set[Right]:
    """Of calls for resources that were allowed; an apply that made something was a create too."""
    rights = set()
    for call in calls:
        if call.resource and call.is_allowed:
            rights.add(Right(call.group, call.resource, call.verb))
            if call.verb == "patch" and call.code == HTTPStatus.CREATED:
                rights.add(Right(call.group, call.resource, "create"))
    return rights


def refused(calls: Iterable[Call]) -> list[Call]:
    return [call for call in calls if not call.is_allowed]


def documented(role: str) -> dict[Right, str]:
    """The rows under the heading `role`: each right, and the reason why no test exercises it, or an empty text."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (rows,) = [part for part in section if part.startswith(f"{role}\n")]
    found: dict[Right, str] = {}
    for line in rows.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or not cells[0].startswith("`"):
            continue
        for resource in cells[0].replace("`", "").split(", "):
            name, _, group = resource.partition(".")
            reasons = dict(re.findall(r"`(\w+)`: ([^;]+)", cells[3]))
            verbs = re.findall(r"`(\w+)`", cells[1])
            assert reasons.keys() <= set(verbs), line
            found |= {Right(group, name, verb): reasons.get(verb, "") for verb in verbs}
    return found
