"""Compares a live object with the manifest that would be applied, to skip writes that change nothing.

A live object has more fields than the manifest (defaults, status, other managers' fields), so only the fields of the
manifest are compared. A field that was removed from the manifest is found by a digest of the whole manifest, which
every applied object has as an annotation.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from octavo_operator.names import APPLIED

#: A number and a suffix. Text with a longer exponent is no quantity, but for example the digest 12e3456789012345.
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)([a-zA-Z]*)")
_SUFFIXES: dict[str, Decimal] = {"": Decimal(1), "m": Decimal("0.001")} | {
    suffix + binary: Decimal((1024 if binary else 1000) ** power)
    for power, suffix in enumerate("KMGTPE", 1)
    for binary in ("i", "")
}


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own digest as an annotation."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations", {}) | {APPLIED: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def matches(wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> bool:
    """Return whether the live object has all fields of `wanted`, a manifest with its digest."""
    return live is not None and _holds(wanted, live)


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


def parse_quantity(quantity: int | str) -> Decimal | None:
    """Value of a quantity in Kubernetes' notation, as in `resources`; None for any other text."""
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None or found[2] not in _SUFFIXES:
        return None
    return Decimal(found[1]) * _SUFFIXES[found[2]]
