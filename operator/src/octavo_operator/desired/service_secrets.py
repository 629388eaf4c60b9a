"""The Secrets of a service: two of its router, of which engines share one, and one of replicas with several pods."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from octavo_operator.desired.objects import Manifest, child
from octavo_operator.names import ENGINE, ROUTER, group_secret, router_admin_secret, router_secret
from octavo_operator.service import InferenceService

#: Routers that are older than this variable ignore it, and accept the secret that they share with engines.
ADMIN_SECRET_VARIABLE = "OCTAVO_ADMIN_SECRET"


class ServiceSecrets(NamedTuple):
    """`shared`: router and engines authenticate each other with it. `admin`: the operator authenticates to routers with
    it; engines, which tenants control, do not have it. `group`: the pods of a replica authenticate each other with it.
    """

    shared: str
    admin: str
    group: str


def desired_secrets(service: InferenceService, secrets: ServiceSecrets) -> Iterator[tuple[Manifest, str]]:
    """The Secrets of the service's own router and of its replicas, each with the reason to create it."""
    shared, admin, group = router_secret(service.name), router_admin_secret(service.name), group_secret(service.name)
    yield _secret(service, shared, secrets.shared, ROUTER), "routers and engines authenticate each other with it"
    yield _secret(service, admin, secrets.admin, ROUTER), "the operator authenticates to routers with it"
    yield _secret(service, group, secrets.group, ENGINE), "the pods of a replica authenticate each other with it"


def secret_variables(service: InferenceService) -> list[Manifest]:
    """Variables of the router's container with the values of its Secrets."""
    secrets = {
        "OCTAVO_ROUTER_SECRET": router_secret(service.name),
        ADMIN_SECRET_VARIABLE: router_admin_secret(service.name),
    }
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": "secret"}}}
        for variable, name in secrets.items()
    ]


def mounted_secrets(template: Mapping[str, Any]) -> set[str]:
    """Names of the Secrets from which the pods of a template have variables."""
    containers = template["spec"]["containers"]
    sources = (variable.get("valueFrom") or {} for each in containers for variable in each.get("env", ()))
    return {source["secretKeyRef"]["name"] for source in sources if "secretKeyRef" in source}


def _secret(service: InferenceService, name: str, value: str, component: str) -> Manifest:
    return child(service, "v1", "Secret", name, component=component, type="Opaque", stringData={"secret": value})
