"""Whether a child is to be written, and as what: made, brought to what the spec says now, or repaired.

A repair is a write for a spec that was applied already: somebody else changed or removed the child since. It is told
apart because people want to know that their change was undone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo_operator.observed import Observed
from octavo_operator.plan.actions import Apply
from octavo_operator.plan.apply_digest import APPLIED, matches
from octavo_operator.plan.owner import is_ours
from octavo_operator.service import InferenceService

Raw = Mapping[str, Any]


def child_actions(
    service: InferenceService, observed: Observed, manifest: Raw, live: Raw | None, *, why: str = "the spec asks for it"
) -> Iterator[Apply]:
    """`manifest`: stamped."""
    if matches(manifest, live) or (live is not None and not is_ours(live, service)):
        return
    if live is None:
        gone = _was_applied(service, observed)
        yield Apply(manifest, "it is missing" if gone else why, is_new=True, repairs=gone)
    elif _digest(live) in (None, _digest(manifest)):
        yield Apply(manifest, "it was changed", repairs=True)
    else:
        yield Apply(manifest, why)


def _digest(manifest: Raw) -> Any:
    return (manifest["metadata"].get("annotations") or {}).get(APPLIED)


def _was_applied(service: InferenceService, observed: Observed) -> bool:
    """All children of this very spec were there once."""
    for row in observed.status.get("conditions", ()):
        if row["type"] == "ChildrenApplied":
            return bool(row["reason"] == "Applied" and row.get("observedGeneration") == service.generation)
    return False
