"""The documents of the custom metrics API, custom.metrics.k8s.io/v1beta2, for InferenceServices. Pure.

The types are those of k8s.io/metrics/pkg/apis/custom_metrics/v1beta2, without fields that their clients don't read.
"""

from http import HTTPStatus
from typing import Any

from octavo_operator.names import METRIC_NAMES
from octavo_operator.spec.quantity import to_milli
from octavo_operator.spec.service import GROUP as SERVICE_GROUP
from octavo_operator.spec.service import KIND
from octavo_operator.spec.service import VERSION as SERVICE_VERSION

GROUP, VERSION = "custom.metrics.k8s.io", "v1beta2"
GROUP_VERSION = f"{GROUP}/{VERSION}"
RESOURCE = f"inferenceservices.{SERVICE_GROUP}"
METRICS = tuple(METRIC_NAMES.values())

Document = dict[str, Any]


def resource_list() -> Document:
    """The API's resources, which clients discover."""
    resources = [
        {
            "name": f"{RESOURCE}/{metric}",
            "singularName": "",
            "namespaced": True,
            "kind": "MetricValueList",
            "verbs": ["get"],
        }
        for metric in METRICS
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP_VERSION, "resources": resources}


def value_list(namespace: str, name: str, metric: str, value: float, now: str) -> Document:
    """The value of one metric of a service, in thousandths. `now`: RFC 3339."""
    service = {
        "kind": KIND,
        "namespace": namespace,
        "name": name,
        "apiVersion": f"{SERVICE_GROUP}/{SERVICE_VERSION}",
    }
    item = {
        "describedObject": service,
        "metric": {"name": metric},
        "timestamp": now,
        "value": f"{to_milli(value)}m",
    }
    return {"kind": "MetricValueList", "apiVersion": GROUP_VERSION, "metadata": {}, "items": [item]}


def failure(status: HTTPStatus, message: str) -> Document:
    """An error in the form in which the API server answers errors."""
    reason = "".join(word.capitalize() for word in status.phrase.split())
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": status.value,
    }
