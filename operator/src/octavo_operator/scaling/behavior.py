"""Limits of how fast a service is scaled: the `behavior` of a HorizontalPodAutoscaler (autoscaling/v2) as frozen data.

`read_behavior` fills in the defaults of Kubernetes 1.34 (pkg/apis/autoscaling/v2/defaults.go; for the scale-down window
and the tolerance the defaults of kube-controller-manager). `behavior_document` writes the result in full. Write it into
an HPA even if the user gave no behavior: an HPA without one follows an older algorithm, whose scale-up limit is
max(4, 2 x replicas) per sync and which may scale up to the highest count of its scale-down window.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo_operator.spec.quantity import parse_quantity

TOLERANCE = 0.1
SCALE_DOWN_WINDOW_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """Limit of the change within `period_s` seconds: `value` replicas, or percent of the count at its start."""

    type: Literal["Pods", "Percent"]
    value: int
    period_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """Rules of one direction.

    `stabilization_s`: the most careful count that was asked for within these seconds counts. `select`: the policy that
    allows the largest (Max) or smallest (Min) change counts; Disabled forbids the direction. `tolerance`: deviation
    from the target, as a ratio, that changes nothing.
    """

    stabilization_s: int
    select: Literal["Max", "Min", "Disabled"] = "Max"
    policies: tuple[ScalingPolicy, ...]
    tolerance: float = TOLERANCE

    @property
    def longest_period_s(self) -> int:
        return max(policy.period_s for policy in self.policies)


_SCALE_UP = ScalingRules(
    stabilization_s=0,
    policies=(
        ScalingPolicy(type="Pods", value=4, period_s=15),
        ScalingPolicy(type="Percent", value=100, period_s=15),
    ),
)
_SCALE_DOWN = ScalingRules(
    stabilization_s=SCALE_DOWN_WINDOW_S, policies=(ScalingPolicy(type="Percent", value=100, period_s=15),)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """Rules of both directions. The defaults are those of a HorizontalPodAutoscaler."""

    scale_up: ScalingRules = field(default=_SCALE_UP)
    scale_down: ScalingRules = field(default=_SCALE_DOWN)


def read_behavior(document: Mapping[str, Any] | None) -> Behavior:
    """`document`: the field `behavior` as in a manifest. Every absent field has its default, policies as a whole.

    Raise ValueError if a tolerance is no quantity; the other fields are as the CRD admits them.
    """
    document = document or {}
    return Behavior(
        scale_up=_read_rules(document.get("scaleUp") or {}, _SCALE_UP),
        scale_down=_read_rules(document.get("scaleDown") or {}, _SCALE_DOWN),
    )


def _read_rules(document: Mapping[str, Any], default: ScalingRules) -> ScalingRules:
    window_s, tolerance = document.get("stabilizationWindowSeconds"), document.get("tolerance")
    policies = tuple(
        ScalingPolicy(type=policy["type"], value=policy["value"], period_s=policy["periodSeconds"])
        for policy in document.get("policies") or ()
    )
    return ScalingRules(
        stabilization_s=default.stabilization_s if window_s is None else window_s,
        select=document.get("selectPolicy") or default.select,
        policies=policies or default.policies,
        tolerance=default.tolerance if tolerance is None else _read_tolerance(tolerance),
    )


def _read_tolerance(tolerance: int | float | str) -> float:
    value = parse_quantity(str(tolerance))
    if value is None:
        raise ValueError(f"tolerance: {tolerance!r} is no quantity; write it like 0.05 or 50m")
    return float(value)


def behavior_document(behavior: Behavior) -> dict[str, Any]:
    """The field `behavior` of a manifest, with all fields but a tolerance that is the default.

    API servers before 1.35 drop a tolerance (feature gate HPAConfigurableTolerance), and their HPAs use the default.
    """
    return {"scaleUp": _rules_document(behavior.scale_up), "scaleDown": _rules_document(behavior.scale_down)}


def _rules_document(rules: ScalingRules) -> dict[str, Any]:
    policies = [{"type": p.type, "value": p.value, "periodSeconds": p.period_s} for p in rules.policies]
    tolerance = {} if rules.tolerance == TOLERANCE else {"tolerance": f"{rules.tolerance:f}"}
    return {
        "stabilizationWindowSeconds": rules.stabilization_s,
        "selectPolicy": rules.select,
        "policies": policies,
        **tolerance,
    }
