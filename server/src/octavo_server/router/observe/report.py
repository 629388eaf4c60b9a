"""`Report`: state, metrics and decisions of one worker, which it sends to the worker that serves an HTTP request."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from prometheus_client import ProcessCollector

from octavo_server.prometheus_text import family_text
from octavo_server.router.balance.breaker import BreakerState
from octavo_server.router.observe.debug import DecisionInfo, decision_info
from octavo_server.router.observe.metrics.catalogue import MetricSnapshot
from octavo_server.router.observe.metrics.render import Gauges, MetricText
from octavo_server.router.observe.state import (
    ORDER,
    IndexInfo,
    RouterState,
    index_info,
    merged,
    replica_state,
    router_state,
)

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import PrefixIndex
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.observe.decision_log import Entry
    from octavo_server.router.observe.request_observer import RouterTelemetry


class ReportQuery(msgspec.Struct):
    """Query to a worker. `n`: limit of returned decisions. `after`: worker -> number of its last known decision.

    `notify` has an empty report: it announces that the sender's state changed.
    """

    what: Literal["state", "metrics", "decisions", "ended", "index", "notify"]
    n: int = 0
    after: dict[str, int] = {}


class Report(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`process`: standard process metrics of Prometheus, name -> value."""

    state: RouterState = msgspec.field(default_factory=RouterState)
    index: IndexInfo = msgspec.field(default_factory=IndexInfo)
    observed: MetricSnapshot | None = None
    process: dict[str, float] = {}
    decisions: list[DecisionInfo] = []


class Waiting(msgspec.Struct, frozen=True):
    """Numbers of waiting requests by model. `queue`: models with a replica. `held`: other models."""

    queue: Mapping[str, int] = {}
    held: Mapping[str, int] = {}


def _closed(_: str) -> BreakerState:
    return "closed"


class Reporter:
    """Builds the reports of one worker. `breaker`: name of a replica -> state of its breaker. `clock`: the picker's.
    `accepts`: whether the worker takes new requests. `models`: names of all models, those that replicas report if None.
    """

    def __init__(
        self,
        *,
        telemetry: "RouterTelemetry",
        index: "PrefixIndex",
        replicas: "Callable[[], Iterable[Replica]]",
        waiting: Callable[[], Waiting],
        breaker: Callable[[str], BreakerState] = _closed,
        clock: Callable[[], float],
        accepts: Callable[[], bool] = lambda: True,
        models: Callable[[], Iterable[str] | None] = lambda: None,
    ) -> None:
        self._telemetry = telemetry
        self._index = index
        self._replicas = replicas
        self._waiting = waiting
        self._breaker = breaker
        self._clock = clock
        self._accepts = accepts
        self._models = models
        self._process = ProcessCollector(registry=None)
        self._faults: dict[Replica, int] = {}

    def count_faults(self, replica: "Replica") -> None:
        """Add the replica's new stream faults to the metrics. To be called at each change of a replica."""
        if replica.num_faults:
            self._telemetry.metrics.record_stream_faults(replica.num_faults - self._faults.get(replica, 0))
            self._faults[replica] = replica.num_faults
        if replica.state == "gone":
            self._faults.pop(replica, None)

    def state(self) -> RouterState:
        waiting, now = self._waiting(), self._clock()
        replicas = (replica_state(replica, now, self._breaker(replica.name)) for replica in self._replicas())
        return router_state(
            replicas,
            models=self._models(),
            queue=waiting.queue,
            held=waiting.held,
            requests=self._telemetry.num_requests,
            accepts=self._accepts(),
        )

    def report(self, query: ReportQuery) -> Report:
        match query.what:
            case "state":
                return Report(state=self.state())
            case "index":
                return Report(state=self.state(), index=index_info(self._index))
            case "notify":
                return Report()
            case "decisions":
                return Report(decisions=self._infos(self._telemetry.decisions.latest(query.n)))
            case "ended":
                log = self._telemetry.decisions
                return Report(decisions=self._infos(log.ended_after(query.after.get(log.worker, 0))))
            case "metrics":
                return Report(
                    state=self.state(),
                    index=index_info(self._index),
                    observed=self._telemetry.metrics.snapshot(),
                    process={s.name: s.value for family in self._process.collect() for s in family.samples},
                )

    def _infos(self, entries: "Iterable[Entry]") -> list[DecisionInfo]:
        telemetry = self._telemetry
        return [decision_info(e, telemetry.time_of(e.decided_s), telemetry.decisions.worker) for e in entries]


def merged_state(reports: Sequence[Report]) -> RouterState:
    return merged([report.state for report in reports])


def merged_index(reports: Sequence[Report]) -> IndexInfo:
    infos = [report.index for report in reports]
    return IndexInfo(
        entries=sum(info.entries for info in infos),
        max_entries=sum(info.max_entries for info in infos),
        bytes=sum(info.bytes for info in infos),
        forgotten=sum(info.forgotten for info in infos),
    )


def latest_decisions(reports: Sequence[Report], n: int) -> list[DecisionInfo]:
    every = [info for report in reports for info in report.decisions]
    return sorted(every, key=lambda info: info.at_s, reverse=True)[:n]


def exposition(reports: Sequence[Report]) -> str:
    observed = [report.observed for report in reports if report.observed is not None]
    text = MetricText(observed, gauges(merged_state(reports), merged_index(reports)))
    return f"{text}{_process_text(reports)}"


def _process_text(reports: Sequence[Report]) -> str:
    pieces = []
    for name, (kind, help, combine) in _PROCESS.items():
        values = [report.process[name] for report in reports if name in report.process]
        if values:
            pieces.append(family_text(name, kind, help, [f"{name} {combine(values)}\n"]))
    return "".join(pieces)


_PROCESS: dict[str, tuple[str, str, Callable[[Iterable[float]], float]]] = {
    "process_cpu_seconds_total": ("counter", "CPU time of all workers, user and system.", sum),
    "process_resident_memory_bytes": ("gauge", "Resident memory of all workers.", sum),
    "process_open_fds": ("gauge", "Open file descriptors of all workers.", sum),
    "process_start_time_seconds": ("gauge", "Start of the oldest worker, since the epoch.", min),
}


def gauges(state: RouterState, index: IndexInfo) -> Gauges:
    by_state = Counter(replica.state for replica in state.replicas)
    followed = [replica for replica in state.replicas if replica.epoch is not None]
    diverged = sum(replica.state != "exact" for replica in followed)
    return {
        "inflight": {(): sum(replica.in_flight for replica in state.replicas)},
        "queue_size": {(): sum(state.queue.values())},
        "held_requests": _held(state),
        "endpoints": {(name,): by_state[name] for name in ORDER if name != "gone"},
        "endpoints_cut_off": {(): sum(replica.breaker == "open" for replica in state.replicas)},
        "endpoints_admitted": {(): sum(replica.admitted for replica in state.replicas)},
        "index_blocks": {(): index.entries},
        "index_bytes": {(): index.bytes},
        "index_forgotten_total": {(): index.forgotten},
        "index_divergence_ratio": {(): diverged / len(followed) if followed else 0.0},
    }


def _held(state: RouterState) -> dict[tuple[str, ...], float]:
    """Held requests by model. Unknown models share the empty label, because clients may send any name."""
    counts: Counter[tuple[str, ...]] = Counter()
    for model, waiting in state.held.items():
        counts[(model if model in state.models else "",)] += waiting
    return dict(counts)
