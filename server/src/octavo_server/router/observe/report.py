"""`Report`: what one worker knows when it is asked, in a form that can be sent to the worker that somebody asked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from prometheus_client import ProcessCollector

from octavo_server.prometheus_text import family_text
from octavo_server.router.balance.breaker import BreakerState
from octavo_server.router.observe.debug import DecisionInfo, decision_info
from octavo_server.router.observe.metrics.catalogue import Observed
from octavo_server.router.observe.metrics.gauges import IndexInfo, gauges, index_info
from octavo_server.router.observe.metrics.render import MetricText
from octavo_server.router.observe.state import RouterState, merged, replica_state, router_state

if TYPE_CHECKING:
    from octavo_server.router.fleet.prefix_index import PrefixIndex
    from octavo_server.router.fleet.replica import Replica
    from octavo_server.router.observe.decision_log import Entry
    from octavo_server.router.observe.request_observer import RouterTelemetry


class Ask(msgspec.Struct):
    """`n`: how many decisions at most; `after`: worker -> the end after which those that ended are asked for."""

    what: Literal["state", "metrics", "decisions", "ended", "index"]
    n: int = 0
    after: dict[str, int] = {}


class Report(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`process`: Prometheus' own names -> values."""

    state: RouterState = msgspec.field(default_factory=RouterState)
    index: IndexInfo = msgspec.field(default_factory=IndexInfo)
    observed: Observed | None = None
    process: dict[str, float] = {}
    decisions: list[DecisionInfo] = []


class Waiting(msgspec.Struct, frozen=True):
    """Requests that no replica has yet. `queue`: of models with replicas; `held`: model -> of those without."""

    queue: int = 0
    held: Mapping[str, int] = {}


def _closed(_: str) -> BreakerState:
    return "closed"


class Reporter:
    """Of one worker. `breaker`: the state of that of a replica by its name; `clock`: that of the picker; `accepts`:
    whether new requests are taken.
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
    ) -> None:
        self._telemetry = telemetry
        self._index = index
        self._replicas = replicas
        self._waiting = waiting
        self._breaker = breaker
        self._clock = clock
        self._accepts = accepts
        self._process = ProcessCollector(registry=None)
        self._faults: dict[Replica, int] = {}

    def changed(self, replica: "Replica") -> None:
        """To be told of every replica whose state changed."""
        if replica.num_faults:
            self._telemetry.metrics.streams_failed(replica.num_faults - self._faults.get(replica, 0))
            self._faults[replica] = replica.num_faults
        if replica.state == "gone":
            self._faults.pop(replica, None)

    def state(self) -> RouterState:
        waiting, now = self._waiting(), self._clock()
        replicas = (replica_state(replica, now, self._breaker(replica.name)) for replica in self._replicas())
        return router_state(replicas, queue=waiting.queue, held=waiting.held, accepts=self._accepts())

    def report(self, ask: Ask) -> Report:
        match ask.what:
            case "state":
                return Report(state=self.state())
            case "index":
                return Report(state=self.state(), index=index_info(self._index))
            case "decisions":
                return Report(decisions=self._infos(self._telemetry.decisions.latest(ask.n)))
            case "ended":
                log = self._telemetry.decisions
                return Report(decisions=self._infos(log.ended_after(ask.after.get(log.worker, 0))))
            case "metrics":
                return Report(
                    state=self.state(),
                    index=index_info(self._index),
                    observed=self._telemetry.metrics.observed(),
                    process={s.name: s.value for family in self._process.collect() for s in family.samples},
                )

    def _infos(self, entries: "Iterable[Entry]") -> list[DecisionInfo]:
        telemetry = self._telemetry
        return [decision_info(e, telemetry.time_of(e.decided_s), telemetry.decisions.worker) for e in entries]


def whole_state(reports: Sequence[Report]) -> RouterState:
    return merged([report.state for report in reports])


def whole_index(reports: Sequence[Report]) -> IndexInfo:
    infos = [report.index for report in reports]
    return IndexInfo(
        entries=sum(info.entries for info in infos),
        max_entries=sum(info.max_entries for info in infos),
        bytes=sum(info.bytes for info in infos),
        forgotten=sum(info.forgotten for info in infos),
    )


def latest_decisions(reports: Sequence[Report], n: int) -> list[DecisionInfo]:
    """The newest first."""
    every = [info for report in reports for info in report.decisions]
    return sorted(every, key=lambda info: info.at_s, reverse=True)[:n]


def exposition(reports: Sequence[Report]) -> str:
    """`/metrics` of the router: all of its workers together."""
    observed = [report.observed for report in reports if report.observed is not None]
    text = MetricText(observed, gauges(whole_state(reports), whole_index(reports)))
    return f"{text}{_process_text(reports)}"


def _process_text(reports: Sequence[Report]) -> str:
    """Sums over the workers, as of one process; the start is that of the oldest."""
    pieces = []
    for name, (kind, help, combine) in _PROCESS.items():
        values = [report.process[name] for report in reports if name in report.process]
        if values:
            pieces.append(family_text(name, kind, help, [f"{name} {combine(values)}\n"]))
    return "".join(pieces)


_PROCESS: dict[str, tuple[str, str, Callable[[Iterable[float]], float]]] = {
    "process_cpu_seconds_total": ("counter", "CPU time, user and system.", sum),
    "process_resident_memory_bytes": ("gauge", "Resident memory.", sum),
    "process_open_fds": ("gauge", "Open file descriptors.", sum),
    "process_start_time_seconds": ("gauge", "Start, since the epoch.", min),
}
