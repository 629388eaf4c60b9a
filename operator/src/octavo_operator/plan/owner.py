"""Whose an object is. Names of children are made from the service's, so something else may have one of them already:
another controller's, a person's, another service's. What isn't ours is neither changed nor deleted.
"""

from collections.abc import Mapping
from typing import Any

from octavo_operator.names import MANAGER, SERVICE_LABEL
from octavo_operator.observed import Refusal
from octavo_operator.service import InferenceService
from octavo_operator.spec.service import GROUP, KIND

Raw = Mapping[str, Any]


def is_ours(live: Raw, service: InferenceService) -> bool:
    """To change. A namesake's that was deleted before this service was made is taken over, and so is what has lost its
    owner but still has our labels.
    """
    controller, labels = controller_of(live), live["metadata"].get("labels") or {}
    if controller is None:
        managed: bool = labels.get("app.kubernetes.io/managed-by") == MANAGER
        return managed and labels.get(SERVICE_LABEL) == service.name
    group = str(controller.get("apiVersion", "")).partition("/")[0]
    return (group, controller["kind"], controller["name"]) == (GROUP, KIND, service.name)


def may_be_deleted(live: Raw, uid: str) -> bool:
    """Only what a service of this uid controls: a copy that a person made of a child has its labels too."""
    controller = controller_of(live)
    return controller is not None and controller["uid"] == uid and "deletionTimestamp" not in live["metadata"]


def controller_of(live: Raw) -> Raw | None:
    references = live["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), None)


def name_taken(live: Raw) -> Refusal:
    controller = controller_of(live)
    owner = (
        "is there, made by somebody else" if controller is None else f"is {controller['kind']} {controller['name']}'s"
    )
    return Refusal("NameTaken", f"{owner}: remove it, or give this service another name")
