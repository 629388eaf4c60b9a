"""The `behavior` of an HPA: the defaults are those of Kubernetes 1.34, pkg/apis/autoscaling/v2/defaults.go."""

from decimal import Decimal
from typing import Any

import pytest
from octavo_operator.scaling.behavior import (
    Behavior,
    ScalingPolicy,
    ScalingRules,
    behavior_document,
    read_behavior,
)
from octavo_operator.spec.quantity import target_to_milli, to_milli

UP = (ScalingPolicy(type="Pods", value=4, period_s=15), ScalingPolicy(type="Percent", value=100, period_s=15))
DOWN = (ScalingPolicy(type="Percent", value=100, period_s=15),)
DEFAULT_UP = {
    "stabilizationWindowSeconds": 0,
    "selectPolicy": "Max",
    "policies": [
        {"type": "Pods", "value": 4, "periodSeconds": 15},
        {"type": "Percent", "value": 100, "periodSeconds": 15},
    ],
}
DEFAULT_DOWN = {
    "stabilizationWindowSeconds": 300,
    "selectPolicy": "Max",
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}


@pytest.mark.parametrize("document", [None, {}, {"scaleUp": {}}, {"scaleUp": None, "scaleDown": {"policies": None}}])
def test_absent_fields_have_the_defaults_of_kubernetes(document: dict[str, Any] | None) -> None:
    expected = Behavior(
        scale_up=ScalingRules(stabilization_s=0, select="Max", policies=UP, tolerance=0.1),
        scale_down=ScalingRules(stabilization_s=300, select="Max", policies=DOWN, tolerance=0.1),
    )
    assert read_behavior(document) == Behavior() == expected
    assert behavior_document(expected) == {"scaleUp": DEFAULT_UP, "scaleDown": DEFAULT_DOWN}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        pytest.param({"stabilizationWindowSeconds": 0}, {"stabilization_s": 0}, id="a window of 0"),
        pytest.param({"selectPolicy": "Disabled"}, {"select": "Disabled"}, id="disabled"),
        pytest.param({"tolerance": "50m"}, {"tolerance": 0.05}, id="tolerance"),
        pytest.param({"tolerance": 0}, {"tolerance": 0.0}, id="no tolerance"),
        pytest.param(
            {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]},
            {"policies": (ScalingPolicy(type="Pods", value=1, period_s=60),)},
            id="given policies replace the default ones",
        ),
    ],
)
def test_a_given_field_leaves_the_defaults_of_the_others(rules: dict[str, Any], expected: dict[str, Any]) -> None:
    default = Behavior().scale_down
    fields = {name: getattr(default, name) for name in ("stabilization_s", "select", "policies", "tolerance")}
    found = read_behavior({"scaleDown": rules})
    assert found == Behavior(scale_down=ScalingRules(**{**fields, **expected}))
    assert read_behavior(behavior_document(found)) == found


def test_a_tolerance_that_is_no_quantity_is_refused() -> None:
    with pytest.raises(ValueError, match="tolerance: '5%' is no quantity"):
        read_behavior({"scaleUp": {"tolerance": "5%"}})


def test_thousandths_of_values_are_the_nearest_and_of_targets_the_upper_ones() -> None:
    assert [to_milli(value) for value in (0, 1.5, 0.0004, 0.0006, 0.1 + 0.2)] == [0, 1500, 0, 1, 300]
    assert [target_to_milli(Decimal(text)) for text in ("0.75", "2", "0.7501", "1.1")] == [750, 2000, 751, 1100]
