"""Models of `spec.autoscaling`."""

from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from octavo_operator.spec.fields import Amount, SpecPart
from octavo_operator.spec.quantity import parse_quantity

Provider = Literal["HPA", "Operator", "External"]
MetricType = Literal["KVUtilization", "WaitingRequests"]
DEFAULT_AVERAGES: dict[MetricType, Decimal] = {"KVUtilization": Decimal("0.75"), "WaitingRequests": Decimal(2)}
Count = Annotated[int, Field(ge=1, le=1000)]


class MetricSpec(SpecPart):
    type: MetricType
    average: Amount | None = None

    @model_validator(mode="after")
    def _is_positive(self) -> Self:
        if self.average is not None and self.target <= 0:
            raise ValueError(
                "autoscaling.metrics[].average must be more than 0: it is the value per replica at which no replica is "
                "added or removed"
            )
        return self

    @property
    def target(self) -> Decimal:
        """Value per replica at which no replica is added or removed."""
        average = None if self.average is None else parse_quantity(self.average)
        return DEFAULT_AVERAGES[self.type] if average is None else average


class PolicySpec(SpecPart):
    type: Literal["Pods", "Percent"]
    value: Annotated[int, Field(ge=1)]
    period_seconds: Annotated[int, Field(ge=1, le=1800)]


class RulesSpec(SpecPart):
    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    select_policy: Literal["Max", "Min", "Disabled"] | None = None
    policies: Annotated[tuple[PolicySpec, ...], Field(min_length=1, max_length=8)] | None = None


class BehaviorSpec(SpecPart):
    scale_up: RulesSpec | None = None
    scale_down: RulesSpec | None = None

    def manifest(self) -> dict[str, Any]:
        """The field `spec.behavior` of a HorizontalPodAutoscaler."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ScaleToZero(SpecPart):
    idle_seconds: Annotated[int, Field(ge=10, le=86400)]


class Autoscaling(SpecPart):
    min_replicas: Count | None = None
    max_replicas: Count
    provider: Provider | None = None
    metrics: Annotated[tuple[MetricSpec, ...], Field(min_length=1, max_length=2)] | None = None
    behavior: BehaviorSpec | None = None
    scale_to_zero: ScaleToZero | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.smallest > self.max_replicas:
            raise ValueError(
                "autoscaling.minReplicas is larger than autoscaling.maxReplicas: lower it, or raise maxReplicas"
            )
        if self.provider == "External" and (self.metrics or self.behavior or self.scale_to_zero):
            raise ValueError(
                "with autoscaling.provider External another autoscaler decides: leave metrics, behavior and "
                "scaleToZero out, and set them there"
            )
        types = [metric.type for metric in self.wanted_metrics]
        if len(set(types)) != len(types):
            raise ValueError("autoscaling.metrics has a type twice: list each type once")
        return self

    @property
    def smallest(self) -> int:
        """Smallest number of replicas of a service that does not sleep."""
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def behavior_manifest(self) -> dict[str, Any] | None:
        return None if self.behavior is None else self.behavior.manifest()

    @property
    def wanted_metrics(self) -> tuple[MetricSpec, ...]:
        return self.metrics or tuple(MetricSpec(type=type_) for type_ in DEFAULT_AVERAGES)
