"""Quantities in Kubernetes' notation: a number with a decimal or binary suffix, or with an exponent."""

import math
import re
from decimal import Decimal

#: Pattern of quantities in `resources`, which the CRD has, too. Kubernetes knows signs, too, which make no sense here.
QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
#: A number and a suffix. Text with a longer exponent is no quantity, but for example the digest 12e3456789012345.
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)([a-zA-Z]*)")
_SUFFIXES: dict[str, Decimal] = (
    {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(1000)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("MGTPE", 2)}
    | {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}
)


def parse_quantity(quantity: int | str) -> Decimal | None:
    """Value of a quantity; None for any other text."""
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None or match[2] not in _SUFFIXES:
        return None
    return Decimal(match[1]) * _SUFFIXES[match[2]]


def to_milli(value: float) -> int:
    """Convert a measured value to thousandths, rounded to the nearest integer (ties to even): 1.5 -> 1500.

    A HorizontalPodAutoscaler computes in them (`Quantity.MilliValue`), so every autoscaler must do so.
    """
    return round(value * 1000)


def target_to_milli(target: Decimal) -> int:
    """Thousandths of a target, rounded up as by Kubernetes' `MilliValue`."""
    return math.ceil(target * 1000)
