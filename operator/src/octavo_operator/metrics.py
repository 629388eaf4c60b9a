"""`Telemetry`: the operator's Prometheus metrics, about itself and about the services that it manages.

Counters are incremented as events happen; gauges are computed at each scrape. Only the leading operator exports metrics
of services, so that two operators don't count them twice. A test compares docs/reference/metrics.md with these metrics.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from octavo_operator.plan.actions import Action, Apply, CreateOnce, Delete, NotifyPod, SetGate, SetReplicas

PREFIX = "octavo_operator_"
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
UNREACHABLE = "Unreachable"
SERVICE_LABELS = ("namespace", "infsvc")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingRow:
    """One service with autoscaling. None: the value is unknown, and its series is absent.

    `kv_used_replicas`, `waiting_requests`: its load, as in `ServiceLoad`. `num_wakes`: wakes from zero since this
    operator started. `wake_s`: length of the last wake.
    """

    namespace: str
    infsvc: str
    desired_replicas: int
    max_replicas: int
    kv_used_replicas: float | None = None
    waiting_requests: int | None = None
    num_wakes: int = 0
    wake_s: float | None = None


_AUTOSCALING: tuple[tuple[str, str, Callable[[AutoscalingRow], float | None]], ...] = (
    ("desired_replicas", "Replicas that autoscaling asks for.", lambda row: row.desired_replicas),
    ("max_replicas", "Largest number of replicas that autoscaling may ask for.", lambda row: row.max_replicas),
    (
        "kv_used_replicas",
        "Used KV blocks / blocks of a replica, summed over replicas.",
        lambda row: row.kv_used_replicas,
    ),
    ("waiting_requests", "Requests that wait in engines and routers.", lambda row: row.waiting_requests),
    ("wake_seconds", "Length of the service's last wake from zero replicas.", lambda row: row.wake_s),
)


class Telemetry:
    def __init__(self) -> None:
        self._queue_depth: Callable[[], int] = lambda: 0
        self._leads: Callable[[], bool] = lambda: False
        self._services: Callable[[], Iterable[Mapping[str, Any]]] = tuple
        self._autoscaling: Callable[[], Iterable[AutoscalingRow]] = tuple
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._reconcile_time = Histogram(
            f"{PREFIX}reconcile_seconds",
            "Duration of one reconciliation of a service.",
            registry=self._registry,
            buckets=BOUNDS_S,
        )
        self._errors = Count(
            f"{PREFIX}reconcile_errors",
            "Reconciliations that failed, by reason.",
            ["reason"],
            registry=self._registry,
        )
        self._actions = Count(
            f"{PREFIX}actions",
            "Writes to the API server for services, by action and kind.",
            ["action", "kind"],
            registry=self._registry,
        )
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def set_sources(
        self,
        *,
        queue_depth: Callable[[], int],
        leads: Callable[[], bool],
        services: Callable[[], Iterable[Mapping[str, Any]]],
        autoscaling: Callable[[], Iterable[AutoscalingRow]] = tuple,
    ) -> None:
        """Set the objects from which gauges are computed and which exist only after start-up. `services`: the latest
        manifests. `autoscaling`: one row for each service with autoscaling."""
        self._queue_depth, self._leads, self._services = queue_depth, leads, services
        self._autoscaling = autoscaling

    def time_reconcile(self) -> AbstractContextManager[None]:
        timer: AbstractContextManager[None] = self._reconcile_time.time()
        return timer

    def count_error(self, error: Exception) -> None:
        """Count an error by the API server's reason, by "Unreachable", or by the name of the exception's class."""
        reason = getattr(error, "reason", "") or (UNREACHABLE if isinstance(error, OSError) else type(error).__name__)
        self._errors.labels(reason).inc()

    def count_action(self, action: Action) -> None:
        match action:
            case Apply(manifest) | CreateOnce(manifest):
                self._actions.labels(type(action).__name__, manifest["kind"]).inc()
            case Delete(kind):
                self._actions.labels("Delete", kind).inc()
            case SetReplicas(kind):
                self._actions.labels("SetReplicas", kind).inc()
            case SetGate() | NotifyPod():
                self._actions.labels(type(action).__name__, "Pod").inc()

    def collect(self) -> Iterator[Metric]:
        yield _gauge("queue_depth", "Services that wait for reconciliation.", self._queue_depth())
        yield _gauge("leader", "1 in the operator that holds the Lease, 0 in the others.", int(self._leads()))
        ready = [(service["metadata"], _ready(service)) for service in self._services()] if self._leads() else []
        counts = Counter((condition.get("status", "Unknown"), condition.get("reason", "")) for _, condition in ready)
        by_reason = GaugeMetricFamily(
            f"{PREFIX}services",
            "Number of services, by the status and reason of their condition Ready.",
            labels=["ready", "reason"],
        )
        for labels, number in sorted(counts.items()):
            by_reason.add_metric(labels, number)
        yield by_reason
        each = GaugeMetricFamily(
            f"{PREFIX}service_ready", "1 if the service is Ready, else 0.", labels=[*SERVICE_LABELS, "reason"]
        )
        for metadata, condition in ready:
            place = (metadata["namespace"], metadata["name"], condition.get("reason", ""))
            each.add_metric(place, int(condition.get("status") == "True"))
        yield each
        yield _startup_metric(self._services() if self._leads() else ())
        yield from _autoscaling_metrics([*self._autoscaling()] if self._leads() else [])

    def exposition(self) -> bytes:
        text: bytes = generate_latest(self._registry)
        return text

    async def respond(self, _: web.Request) -> web.Response:
        return web.Response(body=self.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, about, value=value)


def _startup_metric(services: Iterable[Mapping[str, Any]]) -> Metric:
    """The status field `startup` of each service, without its total."""
    about = "Seconds of the last replica's start by phase; import, compile and weights are parts of load."
    gauge = GaugeMetricFamily(f"{PREFIX}startup_seconds", about, labels=[*SERVICE_LABELS, "phase"])
    for service in services:
        place = (service["metadata"]["namespace"], service["metadata"]["name"])
        for name, seconds in ((service.get("status") or {}).get("startup") or {}).items():
            if name not in ("pod", "totalSeconds"):
                gauge.add_metric((*place, name.removesuffix("Seconds")), seconds)
    return gauge


def _autoscaling_metrics(rows: Sequence[AutoscalingRow]) -> Iterator[Metric]:
    for name, about, value_of in _AUTOSCALING:
        gauge = GaugeMetricFamily(f"{PREFIX}autoscaling_{name}", about, labels=SERVICE_LABELS)
        for row in rows:
            if (value := value_of(row)) is not None:
                gauge.add_metric((row.namespace, row.infsvc), value)
        yield gauge
    wakes = CounterMetricFamily(f"{PREFIX}autoscaling_wakes", "Wakes from zero replicas.", labels=SERVICE_LABELS)
    for row in rows:
        wakes.add_metric((row.namespace, row.infsvc), row.num_wakes)
    yield wakes


def _ready(service: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the Ready condition; empty for a new service, which has no conditions yet."""
    conditions = (service.get("status") or {}).get("conditions") or ()
    condition: Mapping[str, str] = next((c for c in conditions if c["type"] == "Ready"), {})
    return condition
