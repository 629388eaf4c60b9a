"""Decides whether a child is written, and why: it is new, the spec has changed, or the child is repaired.

A repair is a write for a spec that was applied already: another client has changed or removed the child since. Repairs
are marked, so that an Event informs users that their change was undone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo_operator.observed import Observed
from octavo_operator.plan.actions import Apply
from octavo_operator.plan.apply_digest import digest_of, is_as_returned, matches
from octavo_operator.plan.owner import is_ours
from octavo_operator.service import InferenceService

Raw = Mapping[str, Any]


def child_actions(
    service: InferenceService, observed: Observed, manifest: Raw, live: Raw | None, *, why: str = "the spec asks for it"
) -> Iterator[Apply]:
    """Yield the action that makes the child `live` match `manifest`, which has its digest; none if it matches."""
    if matches(manifest, live) or (live is not None and not is_ours(live, service)):
        return
    ref = (manifest["kind"], manifest["metadata"]["name"])
    if live is not None and is_as_returned(manifest, observed.returned.get(ref), live):
        return
    if live is None:
        was_removed = _was_applied(service, observed)
        yield Apply(manifest, "it is missing" if was_removed else why, is_new=True, repairs=was_removed)
    elif digest_of(live) in (None, digest_of(manifest)):
        yield Apply(manifest, "it was changed", repairs=True)
    else:
        yield Apply(manifest, why)


def _was_applied(service: InferenceService, observed: Observed) -> bool:
    """Return whether all children of the current generation of the spec have been applied before."""
    for row in observed.status.get("conditions", ()):
        if row["type"] == "ChildrenApplied":
            return bool(row["reason"] == "Applied" and row.get("observedGeneration") == service.generation)
    return False
