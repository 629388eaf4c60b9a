"""`InferenceService`: a validated manifest. `Settings`: the settings of the operator's installation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo_operator.spec.service import GROUP, KIND, VERSION, InferenceServiceSpec, read_spec

#: Kubernetes removes a deleted namespace after 10 s and half of its pods' grace period: 40 s with this default.
DEFAULT_DRAIN_S = 45
#: Longest planned drain, before a pod is scaled down or replaced.
DEFAULT_PLANNED_DRAIN_S = 600
#: Seconds of a pod's grace period after the drain: for closing connections and stopping the engine.
SHUTDOWN_S = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    engine_image: str
    router_image: str
    operator_namespace: str  # the only namespace from which NetworkPolicies admit operator pods
    image_pull_policy: str | None = None
    image_pull_secrets: tuple[str, ...] = ()  # beside those of the spec
    router_role: str = "ClusterRole/octavo-router"  # kind and name of the role of routers
    cluster_domain: str = "cluster.local"
    lame_duck_s: int = 15  # seconds for which a terminating pod keeps serving while proxies remove it
    max_rollouts: int = 1  # services rolled out at a time after a default image or setting changes
    has_pod_monitors: bool = False
    monitor_labels: Mapping[str, str] = field(default_factory=dict)  # by which a Prometheus selects PodMonitors
    scraped_from: tuple[str, ...] = ()  # namespaces of Prometheus that NetworkPolicies admit to engines and routers
    scrape_peers: tuple[Mapping[str, Any], ...] = ()  # other collectors that NetworkPolicies admit, as their peers
    has_fixed_user: bool = True  # False: the platform assigns the user of pods, as OpenShift does
    restricts_pods: bool = False  # refuses specs that give pods rights on their node; on by default in `cli.py`
    has_gateway_api: bool = False
    has_group_sets: bool = False  # replicas may have several pods, as LeaderWorkerSets
    has_metrics_api: bool = False  # the operator serves the metrics by which HPAs scale services


class ServiceIdentity(Protocol):
    """The parts of a service by which its objects and its router are found."""

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def router(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService:
    name: str
    namespace: str
    uid: str
    generation: int
    spec: InferenceServiceSpec

    @property
    def router(self) -> str:
        """Name of the service that owns this service's router."""
        ref = self.spec.router.ref
        return self.name if ref is None else ref.name

    @property
    def owns_router(self) -> bool:
        return self.spec.router.ref is None

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.spec.model.served_names or (self.name,)

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute one replica's model together."""
        return (self.spec.parallelism.tensor or 1) * self.num_stages

    @property
    def num_stages(self) -> int:
        """Number of groups of ranks that have the model's layers one after the other."""
        return self.spec.parallelism.pipeline or 1

    @property
    def num_nodes(self) -> int:
        """Number of pods of one replica."""
        return self.spec.parallelism.nodes or 1

    @property
    def num_local_ranks(self) -> int:
        """Number of a replica's ranks that run in one pod."""
        return self.num_ranks // self.num_nodes

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.spec.adapters or ())

    @property
    def drain_timeout_s(self) -> int:
        return self.spec.drain.timeout_seconds or DEFAULT_DRAIN_S

    @property
    def planned_drain_s(self) -> int:
        return self.spec.drain.planned_timeout_seconds or DEFAULT_PLANNED_DRAIN_S

    def grace_s(self, settings: Settings) -> int:
        """Termination grace period of the service's pods in seconds. Pods drain while proxies remove them."""
        return max(self.drain_timeout_s, settings.lame_duck_s) + SHUTDOWN_S

    @property
    def owner(self) -> dict[str, Any]:
        """The owner reference by which Kubernetes deletes children together with the service."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableService:
    """The parts of a manifest that running pods need even if the operator can't read its spec as a whole."""

    name: str
    namespace: str
    generation: int
    router: str
    allow_from: frozenset[str] | None  # services that may use its router; None: all
    replicas: int | None  # None if even this number can't be read


def read_running_parts(manifest: Mapping[str, Any]) -> UnreadableService:
    """Read the parts of any manifest. Raises no error for an invalid spec."""
    metadata, spec = manifest["metadata"], _mapping(manifest.get("spec"))
    about_router, replicas = _mapping(spec.get("router")), spec.get("replicas")
    router, allowed = _mapping(about_router.get("ref")).get("name"), about_router.get("allowFrom")
    is_number = isinstance(replicas, int) and not isinstance(replicas, bool) and replicas >= 0
    return UnreadableService(
        name=metadata["name"],
        namespace=metadata["namespace"],
        generation=metadata.get("generation", 0),
        router=router if isinstance(router, str) else metadata["name"],
        allow_from=frozenset(map(str, allowed)) if isinstance(allowed, list) else None,
        replicas=replicas if is_number else None,
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def read_service(manifest: Mapping[str, Any]) -> InferenceService:
    """Parse a manifest. Raises InvalidSpec, as a CRD of another version may accept a spec that is invalid here."""
    metadata = manifest["metadata"]
    return InferenceService(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=read_spec(manifest),
    )
