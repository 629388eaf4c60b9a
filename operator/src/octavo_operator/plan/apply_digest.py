"""Compares a live object with the manifest that would be applied, to skip writes that change nothing.

A live object has more fields than the manifest (defaults, status, other managers' fields), so only the fields of the
manifest are compared. A field that was removed from the manifest is found by a digest of the whole manifest, which
every applied object has as an annotation.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from octavo_operator.names import APPLIED
from octavo_operator.spec.quantity import parse_quantity


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own digest as an annotation."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations", {}) | {APPLIED: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def matches(wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> bool:
    """Return whether the live object has all fields of `wanted`, a manifest with its digest."""
    return live is not None and _holds(wanted, live)


def is_as_returned(wanted: Mapping[str, Any], returned: Mapping[str, Any] | None, live: Mapping[str, Any]) -> bool:
    """Return whether the live object equals the answer to an earlier write of `wanted`.

    An admission webhook may change each object that is written, such as the registry of its images. A repair would be
    changed again. Only fields of `wanted` are compared, and lists that the webhook has made longer or shorter.
    """
    return returned is not None and digest_of(returned) == digest_of(wanted) and _agrees(wanted, returned, live)


def digest_of(manifest: Mapping[str, Any]) -> str | None:
    """Digest of the manifest that was applied last, from the object's annotation."""
    digest: str | None = (manifest["metadata"].get("annotations") or {}).get(APPLIED)
    return digest


def _agrees(wanted: Any, returned: Any, live: Any) -> bool:
    if isinstance(wanted, Mapping) and isinstance(returned, Mapping) and isinstance(live, Mapping):
        return all(_agrees(value, returned.get(key), live.get(key)) for key, value in wanted.items())
    lists = all(isinstance(value, list | tuple) for value in (wanted, returned, live))
    if lists and len(wanted) == len(returned) == len(live):
        return all(map(_agrees, wanted, returned, live))
    return bool(returned == live) or _is_same_quantity(returned, live)


def _holds(wanted: Any, live: Any) -> bool:
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            _holds(value, live.get(key)) or (value in ({}, []) and key not in live) for key, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return isinstance(live, list) and len(wanted) == len(live) and all(map(_holds, wanted, live))
    return bool(wanted == live) or _is_same_quantity(wanted, live)


def _is_same_quantity(wanted: Any, live: Any) -> bool:
    """Return whether two texts are the same quantity: the API server normalizes 1000m to 1, and 0.5 to 500m."""
    if not isinstance(wanted, int | str) or not isinstance(live, int | str) or isinstance(wanted, bool):
        return False
    first, second = parse_quantity(wanted), parse_quantity(live)
    return first is not None and first == second
