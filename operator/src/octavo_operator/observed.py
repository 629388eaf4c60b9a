"""The observed state of one service: plain data, made from watched objects and from the routers' reports.

No object is fetched on demand: objects are as recent as the last event of their watch. A decision that is based on an
outdated state must lead to the same final state, only later.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from octavo_operator.names import DEPLOYMENT

Ref = tuple[str, str]  # kind, name

#: Reason why a pod isn't ready, derived from its status in Kubernetes and its Events.
Trouble = Literal[
    "Unschedulable",
    "ImagePullError",
    "ConfigError",
    "MountFailed",
    "FetchFailed",
    "CrashLoop",
    "OOMKilled",
    "StartFailed",
    "NodeLost",
]


#: Phases of a start that the engine measures itself.
ENGINE_PHASES = ("import", "compile", "weights")


@dataclass(frozen=True, slots=True)
class Startup:
    """The start of a pod. `seconds` by phase: until it has a node (`schedule`), until init containers have ended, which
    fetch the model (`fetch`), until the image is pulled and the engine runs (`pull`), until its weights are loaded and
    it answers (`load`), and until routers send it requests (`admit`)."""

    PHASES: ClassVar = ("schedule", "fetch", "pull", "load", "admit")

    created: str
    seconds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    name: str
    uid: str
    revision: str
    ordinal: int = 0  # place of its replica in a LeaderWorkerSet
    is_ready: bool = False  # all containers are ready, whether or not the readiness gate is open; the node is alive
    is_pod_ready: bool = False  # the pod's own condition Ready, by which Kubernetes and routers send it requests
    is_admitted: bool = False  # the readiness gate is open
    adapter_list: str = ""  # digest of the latest list of adapters of which the pod was notified
    admitted_epoch: str | None = None  # epoch of the engine process that was admitted
    has_node: bool = False
    waits_since: str | None = None  # RFC 3339: it has found no node
    stuck_since: str | None = None  # RFC 3339: it has its node and is not ready
    draining_since: str | None = None  # RFC 3339: its gate was closed for a drain
    is_terminating: bool = False
    has_ended: bool = False  # no container runs or will run again; Kubernetes keeps the object for a while
    is_fetching: bool = False
    trouble: Trouble | None = None
    message: str = ""
    failure_code: str = ""  # code of the container's termination message; empty if it has none
    restarts: int = 0
    startup: Startup | None = None  # of a pod that serves
    workers: tuple["Pod", ...] = ()  # the other pods of its replica, if that has several

    @property
    def parts(self) -> tuple["Pod", ...]:
        """This pod and its workers, without terminating pods. Pods of a lost node are included, as they are not
        replaced yet."""
        return (self, *(each for each in self.workers if not each.is_terminating or each.trouble == "NodeLost"))

    @property
    def causes(self) -> list["Pod"]:
        """The pods that keep this replica from serving. All pods of a replica end when one of them ends, so a crash
        counts as the cause only if no pod has another trouble."""
        troubled = [part for part in self.parts if part.trouble is not None]
        return [part for part in troubled if part.trouble != "CrashLoop"] or troubled

    @property
    def serves(self) -> bool:
        return self.is_ready and self.is_pod_ready and self.is_admitted and not self.is_terminating


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeployment:
    """The object that holds the replicas of one revision: a Deployment or, if a replica has several pods, a
    LeaderWorkerSet, whose leaders are in `Observed.pods`."""

    name: str
    uid: str
    revision: str
    replicas: int
    created: str  # RFC 3339, so that text sorts by time
    kind: str = DEPLOYMENT
    version: str = ""  # resourceVersion; a delete fails if the Deployment has changed since this version
    is_deleting: bool = False
    failure: str = ""  # reason why Kubernetes can't create its pods; empty if it can
    exceeds_quota: bool = False  # that reason is a ResourceQuota


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Memory of one replica, as its engine reports. `kv_tokens`: number of tokens that fit into its KV cache."""

    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests and KV blocks of replicas. `num_used_blocks`: blocks of running requests, without blocks only cached."""

    running: int = 0
    waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            running=self.running + other.running,
            waiting=self.waiting + other.waiting,
            num_blocks=self.num_blocks + other.num_blocks,
            num_used_blocks=self.num_used_blocks + other.num_used_blocks,
        )


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """The list of adapters that a replica follows. `digest`: of its content. `missing`: adapters of the list that the
    replica has not loaded -> the reason, empty while it loads them."""

    digest: str
    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """The report of one router pod about the engine pods of all services behind it.

    By engine pod: `admitted` (epoch of its KV snapshot in the router), `sizes` (of its model), `revisions` (version of
    its downloaded model), `startups` (seconds of the engine's own start by phase), `adapters` (if it follows a list of
    them), `loads`, `load_times` (monotonic seconds at which its load last changed), `in_flight` (requests sent to it
    and not ended), `worth_tokens` (prompt tokens that only its cache saved lately). `sends_to`: engine pods that may
    get requests from it. By model: `queue` (requests that wait for room on a replica), `held` (requests that wait for a
    first replica), `requests` (all since the router's start, which `start` identifies).
    """

    pod: str
    start: str = ""
    admitted: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)
    revisions: Mapping[str, str] = field(default_factory=dict)
    startups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    adapters: Mapping[str, AdapterReport] = field(default_factory=dict)
    loads: Mapping[str, Load] = field(default_factory=dict)
    load_times: Mapping[str, float] = field(default_factory=dict)
    in_flight: Mapping[str, int] = field(default_factory=dict)
    worth_tokens: Mapping[str, int] = field(default_factory=dict)
    sends_to: frozenset[str] = frozenset()
    queue: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)

    def load_of(self, pods: Iterable[str]) -> Load:
        return sum((self.loads[pod] for pod in pods if pod in self.loads), Load())


#: Reason of the number of replicas that autoscaling wants (condition ScalingReady).
ScalingReason = Literal[
    "Active", "AtMax", "MetricsUnavailable", "ScaledToZero", "Disabled", "ScaledByOthers", "External"
]


@dataclass(frozen=True, slots=True)
class ScalingState:
    """The latest decision about the replicas of a service. `last_active`: RFC 3339 time of its latest request; with
    scaleToZero. `wake_s`: length of its last wake from zero. Both are None if not known."""

    desired: int
    reason: ScalingReason
    message: str
    last_active: str | None = None
    wake_s: int | None = None


@dataclass(frozen=True, slots=True)
class ServiceBehind:
    """A service behind a router. `models`, `adapters`: names by which requests ask for its model or for an adapter of
    it. `sleeps`: it has no replica, and a request starts one. `wake_s`: length of its last wake in seconds, if known.
    """

    models: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    sleeps: bool = False
    wake_s: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a child was not written: another owner's object has its name, the API server refused it, or the write
    failed and a retry may succeed."""

    reason: Literal["NameTaken", "Refused", "Retrying"]
    message: str


@dataclass(frozen=True, slots=True)
class Upgrades:
    """Rollouts of other services that only the operator's settings ask for. `stopped`: a service whose rollout exceeded
    its deadline."""

    num_running: int = 0
    stopped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """`children`: existing objects by kind and name, without engine Deployments and pods. `routers`: report of each
    ready router pod, None if it has not reported yet. `leaving_routers`: the same of each other router pod, whose
    requests may still run. `refusals`: refused writes of this reconciliation. `returned`: objects as the API server
    returned them from the operator's write, where a webhook had changed them.
    """

    children: Mapping[Ref, Mapping[str, Any]] = field(default_factory=dict)
    engine_deployments: tuple[EngineDeployment, ...] = ()
    engine_manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # Deployment's name -> object
    pods: tuple[Pod, ...] = ()
    routers: Mapping[str, RouterReport | None] = field(default_factory=dict)
    leaving_routers: Mapping[str, RouterReport | None] = field(default_factory=dict)
    router_trouble: str = ""
    missing_secrets: frozenset[str] = frozenset()  # names of Secrets for lack of which pods do not start
    router_owner: str | None = None  # owner of the router that spec.router.ref names; None if there is no such service
    may_use_router: bool = True  # False: router.allowFrom of that service does not list this one
    host_owner: str | None = None  # another service that claimed this host and path earlier
    behind_router: Mapping[str, ServiceBehind] = field(default_factory=dict)  # the services behind its router
    taken_models: Mapping[str, str] = field(default_factory=dict)  # name of a model or adapter -> its earlier service
    refusals: Mapping[Ref, Refusal] = field(default_factory=dict)
    returned: Mapping[Ref, Mapping[str, Any]] = field(default_factory=dict)
    scaling: ScalingState | None = None
    upgrades: Upgrades = Upgrades()
    status: Mapping[str, Any] = field(default_factory=dict)

    @property
    def staying_pods(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.pods if not pod.is_terminating and not pod.has_ended)

    @property
    def revisions(self) -> frozenset[str]:
        """Revisions of the engine Deployments that stay."""
        return frozenset(s.revision for s in self.engine_deployments if not s.is_deleting)
