"""Models of the access to a service: `spec.router`, `spec.exposure`, `spec.auth`, `spec.networkPolicy`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from octavo_operator.spec.engine import PullPolicy
from octavo_operator.spec.fields import (
    Annotations,
    Image,
    Name,
    PassedThrough,
    Reference,
    Resources,
    ServiceName,
    SpecPart,
)
from octavo_operator.spec.pod_template import PodTemplate


class Toleration(SpecPart):
    key: Annotated[str, Field(max_length=317)] | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class RouterRef(SpecPart):
    name: ServiceName


class Router(SpecPart):
    ref: RouterRef | None = None
    replicas: Annotated[int, Field(ge=1, le=32)] | None = None
    image: Image | None = None
    image_pull_policy: PullPolicy | None = None
    resources: Resources | None = None
    pod_template: PodTemplate | None = None

    @model_validator(mode="after")
    def _is_own_or_shared(self) -> Self:
        if self.ref is not None and (self.replicas or self.image or self.resources or self.pod_template):
            raise ValueError(
                "router.ref uses another service's router: set replicas, image, resources and podTemplate there"
            )
        return self


class Ingress(SpecPart):
    host: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    path: Annotated[str, Field(max_length=253, pattern="^/")] | None = None
    ingress_class_name: Name | None = None
    tls_secret_name: Name | None = None
    annotations: Annotations = Field(default_factory=dict)


class ParentRef(SpecPart):
    name: Name
    namespace: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    section_name: Name | None = None


class Gateway(SpecPart):
    parent_refs: Annotated[tuple[ParentRef, ...], Field(min_length=1, max_length=8)]
    scheme: Literal["http", "https"] | None = None
    hostnames: Annotated[tuple[Name, ...], Field(max_length=16)] = ()


class Exposure(SpecPart):
    ingress: Ingress | None = None
    gateway: Gateway | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.ingress is None) == (self.gateway is None):
            raise ValueError("exposure needs exactly one of ingress and gateway")
        return self


class Auth(SpecPart):
    required: bool | None = None
    api_keys_secret_ref: Reference | None = None
    isolate_tenants: bool | None = None

    @model_validator(mode="after")
    def _is_clear(self) -> Self:
        if self.api_keys_secret_ref is None and self.required is not False:
            raise ValueError(
                "auth needs apiKeysSecretRef: a Secret with an entry per tenant (name: key); or required: false to "
                "serve everybody"
            )
        if self.api_keys_secret_ref is not None and self.required is False:
            raise ValueError("auth.required: false serves everybody: leave apiKeysSecretRef out")
        return self


def isolates_tenants(auth: Auth | None) -> bool:
    """Return whether tenants may not share cached prefixes: True unless `isolateTenants` is false."""
    return auth is None or auth.isolate_tenants is not False


class NetworkPolicy(SpecPart):
    enabled: bool | None = None
    ingress_from: Annotated[tuple[PassedThrough, ...], Field(max_length=32)] = ()
