"""The observed state of one service: plain data, made from watched objects and from the routers' reports.

Nothing here is fetched on demand: objects are as old as the watch that delivered them. A decision based on an older
view must lead to the same final state, only later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ref = tuple[str, str]  # kind, name

#: Why a pod isn't ready, derived from its status in Kubernetes.
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
    is_ready: bool = False  # all containers are ready; the readiness gate is not included
    is_admitted: bool = False  # the condition of the readiness gate
    admitted_epoch: str | None = None  # epoch of the engine process that was admitted
    is_terminating: bool = False
    is_fetching: bool = False
    trouble: Trouble | None = None
    message: str = ""
    failure_code: str = ""  # code of the container's termination message; empty if it has none
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
    version: str = ""  # resourceVersion; a delete based on an older version than the last change fails
    is_deleting: bool = False
    failure: str = ""  # why Kubernetes can't create its pods


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Memory of one replica's model in bytes, as its engine reports; `kv_tokens` fit into its KV cache."""

    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """The report of one router pod. `admitted`: engine pod → epoch whose KV snapshot it has. `sizes`: by engine pod."""

    pod: str
    admitted: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)
    models: frozenset[str] = frozenset()
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a child was not written: the API server refused it, or its name belongs to another object."""

    reason: Literal["NameTaken", "Refused"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """`children`: live objects by kind and name, without engine Deployments and pods. `routers`: ready router pods by
    name, with None for one that has not reported yet. `refusals`: of the writes that this reconciliation tried.
    """

    children: Mapping[Ref, Mapping[str, Any]] = field(default_factory=dict)
    engine_deployments: tuple[EngineDeployment, ...] = ()
    engine_manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by Deployment name
    pods: tuple[Pod, ...] = ()
    routers: Mapping[str, RouterReport | None] = field(default_factory=dict)
    router_trouble: str = ""
    router_owner: str | None = None  # owner of the router that spec.router.ref names; None if there is no such service
    host_owner: str | None = None  # another service that claimed this host and path earlier
    refusals: Mapping[Ref, Refusal] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
