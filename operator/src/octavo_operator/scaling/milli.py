"""Thousandths, in which a HorizontalPodAutoscaler computes (`Quantity.MilliValue`), so all who scale must do so."""

import math
from decimal import Decimal


def to_milli(value: float) -> int:
    """Thousandths of a measured value, to the nearest and from the middle to the even one: 1.5 -> 1500."""
    return round(value * 1000)


def target_to_milli(target: Decimal) -> int:
    """Thousandths of a target, rounded up as by Kubernetes' `MilliValue`."""
    return math.ceil(target * 1000)
