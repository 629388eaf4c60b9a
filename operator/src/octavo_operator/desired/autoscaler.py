"""The HorizontalPodAutoscaler of a service, and which provider decides about its replicas."""

from decimal import Decimal

from octavo_operator.desired.objects import Manifest, child
from octavo_operator.names import ENGINE, METRIC_NAMES
from octavo_operator.scaling.behavior import behavior_document, read_behavior
from octavo_operator.service import InferenceService, Settings
from octavo_operator.spec.autoscaling import Autoscaling, MetricSpec, Provider
from octavo_operator.spec.quantity import target_to_milli
from octavo_operator.spec.service import GROUP, KIND, VERSION

HPA = "HorizontalPodAutoscaler"


def provider_of(spec: Autoscaling, settings: Settings) -> Provider:
    """The provider that is used: an HPA only if it gets the metrics from this operator."""
    if spec.provider == "External":
        return "External"
    return "HPA" if settings.has_metrics_api and spec.provider != "Operator" else "Operator"


def desired_autoscaler(service: InferenceService, settings: Settings) -> list[Manifest]:
    spec = service.spec.autoscaling
    if spec is None or provider_of(spec, settings) != "HPA":
        return []
    target = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": service.name}
    wanted = {
        "scaleTargetRef": target,
        "minReplicas": spec.smallest,
        "maxReplicas": spec.max_replicas,
        "metrics": [_metric(metric, target) for metric in spec.wanted_metrics],
        "behavior": behavior_document(read_behavior(spec.behavior_manifest)),
    }
    return [child(service, "autoscaling/v2", HPA, service.name, component=ENGINE, spec=wanted)]


def _metric(metric: MetricSpec, target: Manifest) -> Manifest:
    """An HPA divides the value of an Object metric by an AverageValue, so the metric is a sum over the replicas."""
    average = {"type": "AverageValue", "averageValue": _quantity(metric.target)}
    return {
        "type": "Object",
        "object": {"metric": {"name": METRIC_NAMES[metric.type]}, "describedObject": target, "target": average},
    }


def _quantity(value: Decimal) -> str:
    """The quantity in the form in which the API server stores it."""
    milli = target_to_milli(value)
    return f"{milli}m" if milli % 1000 else str(milli // 1000)
