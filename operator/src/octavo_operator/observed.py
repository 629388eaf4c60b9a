"""What the operator sees of one service: plain data, made from watched objects and from what routers report.

Objects are as old as the watch that brought them; nothing here is fetched for the occasion. Whoever decides by it must
come to the same end from an older view, only later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ref = tuple[str, str]  # kind, name

#: Why a pod isn't ready, as far as Kubernetes says.
Trouble = Literal[
    "Unschedulable",
    "ImagePullError",
    "ConfigError",
    "MountFailed",
    "FetchFailed",
    "CrashLoop",
    "OOMKilled",
    "StartFailed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    uid: str
    revision: str
    is_ready: bool = False  # by its own containers; the gate is apart
    is_admitted: bool = False  # the gate's condition
    admitted_epoch: str | None = None  # of the engine that was admitted
    is_terminating: bool = False
    is_fetching: bool = False
    trouble: Trouble | None = None
    message: str = ""
    restarts: int = 0

    @property
    def serves(self) -> bool:
        return self.is_ready and self.is_admitted and not self.is_terminating


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeployment:
    """The engine Deployment of one revision."""

    name: str
    uid: str
    revision: str
    replicas: int
    created: str  # RFC 3339, so that text sorts by time
    version: str = ""  # of the object, as Kubernetes counts: a delete by an older view than the last change fails
    is_deleting: bool = False
    failure: str = ""  # why its pods can't even be made


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a replica's model takes, as its engine says; `kv_tokens` fit into its KV cache."""

    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """What one router pod says; `admitted`: engine pod name → epoch whose snapshot it has. `sizes`: by engine pod."""

    pod: str
    admitted: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)
    models: frozenset[str] = frozenset()
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the API server, or we ourselves, would not write a child."""

    reason: Literal["NameTaken", "Refused"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """`children`: live objects by kind and name, engine Deployments and pods apart. `routers`: ready router pods by
    name, with None for one that hasn't reported yet. `refusals`: of writes that were just tried.
    """

    children: Mapping[Ref, Mapping[str, Any]] = field(default_factory=dict)
    engine_deployments: tuple[EngineDeployment, ...] = ()
    engine_manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by Deployment name
    pods: tuple[Pod, ...] = ()
    routers: Mapping[str, RouterReport | None] = field(default_factory=dict)
    router_trouble: str = ""
    router_owner: str | None = None  # who owns the router that spec.router.ref names; None: there is no such service
    host_owner: str | None = None  # another service that claimed this host and path before
    refusals: Mapping[Ref, Refusal] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
