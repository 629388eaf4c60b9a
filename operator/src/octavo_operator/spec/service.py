"""`InferenceServiceSpec`: the spec of an InferenceService, as its CRD has it (`crds/`).

The CRD is the source; a test compares these models with it field by field, and checks the rules of both with one table
of valid and invalid specs. The operator and `octavo up -f` read manifests through these models.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from octavo_operator.spec.access import Auth, Exposure, NetworkPolicy, Router, Toleration
from octavo_operator.spec.autoscaling import Autoscaling
from octavo_operator.spec.engine import Engine, Parallelism
from octavo_operator.spec.fields import (
    Name,
    NodeSelector,
    PassedThrough,
    Quantity,
    Reference,
    Resources,
    Share,
    SpecPart,
)
from octavo_operator.spec.model import FORMS, URI_PATTERN, Model, claim_name
from octavo_operator.spec.pod_template import PodMetadata

GROUP = "serving.octavo.dev"
VERSION = "v1alpha1"
KIND = "InferenceService"
MAX_NAME_CHARS = 40
ADAPTER_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$"
DEFAULT_PATIENCE_S, DEFAULT_DEADLINE_S = 600, 3600

Seconds = Annotated[int, Field(ge=1, le=604800)]

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class InvalidSpec(Exception):
    """The manifest can't be served; the message has a line for each fault, with the field and the remedy."""


class Drain(SpecPart):
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None
    planned_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None


class DisruptionBudget(SpecPart):
    max_unavailable: Share | None = None


class Adapter(SpecPart):
    """A LoRA adapter of the model, which engines load and unload while they serve."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=ADAPTER_NAME_PATTERN)]
    uri: Annotated[str, Field(min_length=7, max_length=1024, pattern=URI_PATTERN)]

    @property
    def claim(self) -> str | None:
        """The PersistentVolumeClaim of a pvc:// adapter."""
        return claim_name(self.uri)


Adapters = Annotated[tuple[Adapter, ...], Field(max_length=32)]


class Rollout(SpecPart):
    """The way in which a new revision replaces the old one."""

    strategy: Literal["Auto", "Surge", "InPlace"] | None = None
    max_surge: Annotated[int, Field(ge=1, le=1000)] | None = None
    surge_patience_seconds: Seconds | None = None
    progress_deadline_seconds: Seconds | None = None
    paused: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.strategy == "InPlace" and self.max_surge is not None:
            raise ValueError("rollout.strategy InPlace starts no replica beyond replicas: leave maxSurge out")
        if self.strategy in ("Surge", "InPlace") and self.surge_patience_seconds is not None:
            raise ValueError(
                "rollout.surgePatienceSeconds is how long strategy Auto waits for room before it goes in place: leave "
                "it out, or choose Auto"
            )
        return self

    @property
    def patience_s(self) -> int:
        return self.surge_patience_seconds or DEFAULT_PATIENCE_S

    @property
    def deadline_s(self) -> int:
        return self.progress_deadline_seconds or DEFAULT_DEADLINE_S


class InferenceServiceSpec(SpecPart):
    model: Model
    engine: Engine = Engine()
    adapters: Adapters | None = None
    parallelism: Parallelism = Parallelism()
    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    autoscaling: Autoscaling | None = None
    resources: Resources | None = None
    shared_memory: Quantity | None = None
    node_selector: NodeSelector | None = None
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=32)] = ()
    affinity: PassedThrough | None = None
    topology_spread_constraints: Annotated[tuple[PassedThrough, ...], Field(max_length=8)] = ()
    runtime_class_name: Name | None = None
    priority_class_name: Name | None = None
    image_pull_secrets: Annotated[tuple[Reference, ...], Field(max_length=8)] = ()
    router: Router = Router()
    exposure: Exposure | None = None
    auth: Auth | None = None
    drain: Drain = Drain()
    rollout: Rollout = Rollout()
    disruption_budget: DisruptionBudget = DisruptionBudget()
    network_policy: NetworkPolicy = NetworkPolicy()
    pod_metadata: PodMetadata = PodMetadata()

    @model_validator(mode="after")
    def _has_usable_adapters(self) -> Self:
        names = [adapter.name for adapter in self.adapters or ()]
        if len(set(names)) != len(names):
            raise ValueError("adapters has a name twice: list each name once")
        if any(adapter.claim not in (None, claim_name(self.model.uri)) for adapter in self.adapters or ()):
            raise ValueError(
                "a pvc:// adapter must be on the claim of a pvc:// model, as engines mount no other claim: move it "
                "there, or to a bucket"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        shared = self.router.ref is not None
        if shared and self.exposure is not None:
            raise ValueError(
                "exposure belongs to the service whose router is shared: expose that one, and leave exposure out here"
            )
        if self.exposure is not None and self.auth is None:
            raise ValueError(
                "an exposed service needs auth: name a Secret in auth.apiKeysSecretRef, or set auth.required: false "
                "to serve everybody"
            )
        if self.router.service.is_public and self.auth is None:
            raise ValueError(
                "a Service of type NodePort or LoadBalancer needs auth: name a Secret in auth.apiKeysSecretRef, or set "
                "auth.required: false to serve everybody"
            )
        if shared and self.auth is not None and (self.auth.api_keys_secret_ref or self.auth.limits) is not None:
            raise ValueError(
                "API keys and their limits belong to the service whose router is shared: set auth there, and leave it "
                "out here"
            )
        return self


def read_spec(manifest: Mapping[str, Any]) -> InferenceServiceSpec:
    """Parse the spec of a manifest. Raises InvalidSpec for a manifest that the API server would refuse, too."""
    api_version, kind = manifest.get("apiVersion"), manifest.get("kind")
    if (api_version, kind) != (f"{GROUP}/{VERSION}", KIND):
        raise InvalidSpec(f"this is {api_version} {kind}; expected {GROUP}/{VERSION} {KIND}.")
    name = str((manifest.get("metadata") or {}).get("name") or "")
    check_name(name)
    try:
        spec = InferenceServiceSpec.model_validate_json(json.dumps(manifest.get("spec")))
    except ValidationError as error:
        raise InvalidSpec("\n".join(_line(fault) for fault in error.errors())) from None
    if spec.router.ref is not None and spec.router.ref.name == name:
        raise InvalidSpec(
            "router.ref names this service itself: leave router.ref out, so that the service has a router of its own"
        )
    if {adapter.name for adapter in spec.adapters or ()} & {*(spec.model.served_names or (name,))}:
        raise InvalidSpec("an adapter has the name of the served model: choose another name for the adapter")
    return spec


def check_name(name: str) -> None:
    """Check the name of a service. Raises InvalidSpec."""
    if len(name) > MAX_NAME_CHARS:
        raise InvalidSpec(
            f"metadata.name has more than {MAX_NAME_CHARS} characters: names of its pods and services are made from "
            f"it, choose a shorter one"
        )
    if not _NAME.fullmatch(name):
        raise InvalidSpec(
            "metadata.name must begin with a letter and hold only lower-case letters, digits and '-': Services are "
            "named after it"
        )


def _line(fault: Any) -> str:
    """Format a fault as the API server does: the field's path, the value, the error."""
    place, value = ".".join(["spec", *(str(part) for part in fault["loc"])]), fault["input"]
    if fault["type"] == "extra_forbidden":
        return f"{place}: unknown field"
    if fault["type"] == "missing":
        return f"{place}: Required value"
    text = FORMS.get(fault.get("ctx", {}).get("pattern")) or fault["msg"].removeprefix("Value error, ")
    return (
        f"{place}: {text}" if isinstance(value, dict | list) else f"{place}: Invalid value: {json.dumps(value)}: {text}"
    )
