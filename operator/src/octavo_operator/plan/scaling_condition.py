"""The condition ScalingReady and the status field `autoscaling`: why a service has its number of replicas."""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo_operator.desired.autoscaler import HPA, provider_of
from octavo_operator.observed import Observed
from octavo_operator.plan.conditions import Condition
from octavo_operator.service import InferenceService, Settings
from octavo_operator.spec.autoscaling import Autoscaling

SCALING = "ScalingReady"
#: Reason in the HPA's status -> reason of ScalingReady. Reasons that are not listed are about the metrics.
_STOPPED = {"ScalingDisabled": "Disabled", "AmbiguousSelector": "ScaledByOthers"}


def scaling_condition(service: InferenceService, observed: Observed, settings: Settings) -> Iterator[Condition]:
    """Yield the condition ScalingReady of a service with autoscaling."""
    spec, state = service.spec.autoscaling, observed.scaling
    if spec is None:
        return
    if state is None:
        yield Condition(SCALING, "MetricsUnavailable", "the operator has not seen the load of this service yet")
    elif state.reason == "Active" and provider_of(spec, settings) == "HPA" and service.spec.replicas:
        yield _hpa_condition(spec, observed.children.get((HPA, service.name), {}))
    elif state.reason == "Active":
        by = "the operator" + (", as this cluster has no metrics for an HPA," if spec.provider == "HPA" else "")
        yield Condition(SCALING, "Active", f"{by} chooses {_range(spec)} replicas by {_metrics(spec)}")
    else:
        yield Condition(SCALING, state.reason, state.message)


def scaling_status(service: InferenceService, observed: Observed, settings: Settings) -> dict[str, Any]:
    """The status field `autoscaling`. Without a decision it keeps the old one."""
    spec, state, before = service.spec.autoscaling, observed.scaling, observed.status.get("autoscaling") or {}
    if spec is None:
        return {}
    if state is None:
        return {"autoscaling": before} if before else {}
    condition = next(scaling_condition(service, observed, settings))
    status = observed.children.get((HPA, service.name), {}).get("status") or {}
    is_awake = state.reason == "Active" and service.spec.replicas > 0
    fields = {
        "desired": status.get("desiredReplicas", state.desired) if is_awake else state.desired,
        "reason": condition.reason,
        "lastActive": state.last_active if spec.scale_to_zero else None,
        "wakeSeconds": state.wake_s if state.wake_s is not None else before.get("wakeSeconds"),
    }
    return {"autoscaling": {name: value for name, value in fields.items() if value is not None}}


def _hpa_condition(spec: Autoscaling, hpa: Mapping[str, Any]) -> Condition:
    rows = {row["type"]: row for row in (hpa.get("status") or {}).get("conditions") or ()}
    for type_ in ("ScalingActive", "AbleToScale"):
        row = rows.get(type_)
        if row is None or row["status"] != "True":
            why = "the HorizontalPodAutoscaler has not begun" if row is None else f"{row['reason']}: {row['message']}"
            reason = _STOPPED.get("" if row is None else row["reason"], "MetricsUnavailable")
            return Condition(SCALING, reason, f"{why}; the number of replicas does not change")
    limited = rows.get("ScalingLimited", {})
    if (limited.get("status"), limited.get("reason")) == ("True", "TooManyReplicas"):
        return Condition(SCALING, "AtMax", f"the load asks for more than autoscaling.maxReplicas, {spec.max_replicas}")
    what = f"a HorizontalPodAutoscaler chooses {_range(spec)} replicas by {_metrics(spec)}"
    return Condition(SCALING, "Active", what)


def _range(spec: Autoscaling) -> str:
    return f"{spec.smallest} to {spec.max_replicas}"


def _metrics(spec: Autoscaling) -> str:
    return " and ".join(f"{metric.type} ({metric.target.normalize():f} per replica)" for metric in spec.wanted_metrics)
