"""Whether a live object is what we would apply: then nothing is written.

A live object has more fields than we apply (defaults, status, other managers' fields), so each field of ours must be
there with our value. What we no longer apply shows in a digest that every object carries of all that was applied.
"""

import hashlib
import json
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from octavo_operator.spec.service import GROUP

APPLIED = f"{GROUP}/applied"

_SUFFIXES: dict[str, Decimal] = {"": Decimal(1), "m": Decimal("0.001")} | {
    suffix + binary: Decimal((1024 if binary else 1000) ** power)
    for power, suffix in enumerate("KMGTPE", 1)
    for binary in ("i", "")
}


def with_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """With the digest of itself as an annotation."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations", {}) | {APPLIED: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def matches(wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> bool:
    """`wanted`: stamped."""
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
    """The API server writes quantities in its own way: 1000m as 1, 0.5 as 500m."""
    if not isinstance(wanted, int | str) or not isinstance(live, int | str) or isinstance(wanted, bool):
        return False
    first, second = parse_quantity(wanted), parse_quantity(live)
    return first is not None and first == second


def parse_quantity(quantity: int | str) -> Decimal | None:
    """Of a quantity in Kubernetes' notation, as in `resources`; None for what isn't one."""
    text = str(quantity)
    digits = text.rstrip("mkKMGTPEi")
    try:
        return Decimal(digits) * _SUFFIXES[text[len(digits) :]]
    except (InvalidOperation, KeyError):
        return None
