"""Decides whether an object belongs to a service. Children's names derive from the service's name, so an object of
another controller, user or service may have such a name already. The operator neither changes nor deletes that object.
"""

from collections.abc import Mapping
from typing import Any

from octavo_operator.names import MANAGER, SERVICE_LABEL
from octavo_operator.observed import Refusal
from octavo_operator.service import ServiceIdentity
from octavo_operator.spec.service import GROUP, KIND

Raw = Mapping[str, Any]


def is_ours(live: Raw, service: ServiceIdentity) -> bool:
    """Return whether the operator may change the object for this service: its owner is this or an earlier service of
    the same name, or it has no owner but the operator's labels, as a retained claim.
    """
    controller, labels = controller_of(live), live["metadata"].get("labels") or {}
    if controller is None:
        managed: bool = labels.get("app.kubernetes.io/managed-by") == MANAGER
        return managed and labels.get(SERVICE_LABEL) == service.name
    group = str(controller.get("apiVersion", "")).partition("/")[0]
    return (group, controller["kind"], controller["name"]) == (GROUP, KIND, service.name)


def may_be_deleted(live: Raw, uid: str) -> bool:
    """Return whether the service with this uid controls the object. Labels don't suffice: a user's copy has them."""
    controller = controller_of(live)
    return controller is not None and controller["uid"] == uid and "deletionTimestamp" not in live["metadata"]


def controller_of(live: Raw) -> Raw | None:
    references = live["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), None)


def name_taken(live: Raw) -> Refusal:
    controller = controller_of(live)
    owner = (
        "exists and has another owner"
        if controller is None
        else f"belongs to {controller['kind']} {controller['name']}"
    )
    return Refusal("NameTaken", f"{owner}: remove it, or give this service another name")
