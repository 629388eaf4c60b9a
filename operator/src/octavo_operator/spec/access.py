"""Models of the access to a service: `spec.router`, `spec.exposure`, `spec.auth`, `spec.networkPolicy`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from octavo_operator.spec.engine import EnvVar, ExtraArgs, PullPolicy, are_flags, sets_any
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

#: Pattern of flags that `router.extraArgs` may not contain: the operator sets them, or the spec has fields for them.
ROUTER_FLAGS = (
    "--(no-)?(config|host|port|admin-port|kubernetes|service|services-file|replica|root-path|drain-timeout|shutdown-timeout|shutdown-delay|api-key|"
    "api-key-file|tenants-file|router-secret|router-secret-file|admin-secret)"
)


class Toleration(SpecPart):
    key: Annotated[str, Field(max_length=317)] | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class RouterRef(SpecPart):
    name: ServiceName


class RouterService(SpecPart):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    annotations: Annotations = Field(default_factory=dict)

    @property
    def is_public(self) -> bool:
        """True for a Service that clients outside of the cluster may reach."""
        return self.type in ("NodePort", "LoadBalancer")


class Router(SpecPart):
    ref: RouterRef | None = None
    allow_from: Annotated[tuple[ServiceName, ...], Field(max_length=256)] | None = None
    replicas: Annotated[int, Field(ge=1, le=32)] | None = None
    image: Image | None = None
    image_pull_policy: PullPolicy | None = None
    resources: Resources | None = None
    extra_args: ExtraArgs = ()
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    service: RouterService = RouterService()
    pod_template: PodTemplate | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.ref is not None and self.model_fields_set != {"ref"}:
            raise ValueError(
                "router.ref uses another service's router: leave the other fields of router out, and set them there"
            )
        if sets_any(self.extra_args, ROUTER_FLAGS):
            raise ValueError(
                "router.extraArgs repeats a flag that the operator sets itself, or for which the spec has a field "
                "(auth, drain, exposure): leave it out"
            )
        if not are_flags(self.extra_args):
            raise ValueError(
                "router.extraArgs has an item that is no flag: write a flag and its value as one item, --flag=value"
            )
        if len({variable.name for variable in self.env}) != len(self.env):
            raise ValueError("router.env has a name twice: list each name once")
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
    limits: Reference | None = None
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
    egress_to: Annotated[tuple[PassedThrough, ...], Field(max_length=32)] | None = None
