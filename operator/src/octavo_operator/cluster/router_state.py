"""`RouterState`: the state of one router pod, from the events of its stream (docs/reference/router.md).

The router's image may be any program, so impossible figures are dropped, and texts and names are limited.
"""

from collections.abc import Set
from itertools import islice
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, astuple

from octavo_operator.observed import ENGINE_PHASES, AdapterReport, Load, ModelSize, RouterReport

#: The kind of an event's changes: `numbers` if only figures that vary constantly have changed.
Change = Literal["held", "replicas", "numbers"]
MAX_NAMES = 4096
MAX_COUNT = 2**53
LONGEST_REVISION = 256
#: Number of missing adapters of a replica that are kept, and length to which their texts are cut.
MAX_MISSING, LONGEST_TEXT = 256, 256
MOST_STARTUP_S = 7 * 86400  # the status has it as an integer

Id = Annotated[str, Meta(max_length=64)]
Name = Annotated[str, Meta(max_length=253)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Counts = Annotated[dict[str, Count], Meta(max_length=MAX_NAMES)]


class _EngineLoad(msgspec.Struct, frozen=True):
    running: int = 0
    waiting: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    received: int = 0


class _EngineModel(msgspec.Struct):
    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    kv_tokens: int


class _AdapterFile(msgspec.Struct):
    digest: str
    missing: dict[str, str] = {}


class _ReplicaState(msgspec.Struct):
    """`load`, `model`, `revision`, `startup_s`, `adapter_file`: the router passes on the engine's report, also
    impossible figures.

    Unknown fields of all structs are ignored, so that routers can be newer.
    """

    name: Name
    acknowledged_epoch: Id | None = None
    withdrawn: bool = False
    in_flight: Count = 0
    worth_tokens: Count = 0
    load: _EngineLoad = _EngineLoad()
    model: _EngineModel | None = None
    revision: str = ""
    startup_s: dict[str, float | None] = {}
    adapter_file: _AdapterFile | None = None


class _Figures(msgspec.Struct):
    replicas: Annotated[list[_ReplicaState], Meta(max_length=MAX_NAMES)] = []
    queue: Counts | None = None
    held: Counts | None = None
    requests: Counts | None = None


class _Event(_Figures, kw_only=True):
    """An event of any type. `state`: only in events of type state. Unknown types are ignored."""

    type: str
    router: Id = ""
    state: _Figures | None = None
    gone: Annotated[list[str], Meta(max_length=MAX_NAMES)] = []


_decode = msgspec.json.Decoder(_Event).decode


class _Replica(NamedTuple):
    """The usable figures of a replica; unknown and impossible figures are None or absent."""

    epoch: str | None
    size: ModelSize | None
    revision: str
    startup: dict[str, float]
    is_withdrawn: bool
    adapters: AdapterReport | None
    load: Load | None = None
    in_flight: int = 0
    worth_tokens: int = 0
    received: int = 0
    load_s: float = 0.0


#: Number of the first fields of `_Replica` that don't vary constantly.
NUM_STEADY = _Replica._fields.index("load")


class RouterState:
    """The state of one router pod, kept up to date by the events of its stream."""

    def __init__(self, pod: str) -> None:
        self._pod = pod
        self._start = ""
        self._replicas: dict[str, _Replica] = {}
        self._numbers: dict[str, dict[str, int]] = {"queue": {}, "held": {}, "requests": {}}
        self._report: RouterReport | None = None
        self._names: Set[str] = frozenset()

    def update(self, data: bytes, now_s: float) -> Change | None:
        """Apply an event and return the kind of its changes.

        `now_s`: monotonic time. Raises ValueError for an unknown format, such as that of another version.
        """
        event = _event_of(data)
        if event.type == "state" and event.state is not None:
            self._start = event.router
            self._replicas.clear()
            return "held" if self._apply(event.state, now_s) == "held" else "replicas"
        if event.type == "change":
            is_gone = [self._replicas.pop(name, None) is not None for name in event.gone]
            changed = self._apply(event, now_s)
            return "replicas" if changed == "numbers" and any(is_gone) else changed
        return None

    def report(self, names: Set[str]) -> RouterReport:
        """The report about those replicas of `names` that the router knows."""
        if self._report is None or self._names != names:
            self._names = frozenset(names)
            self._report = self._make_report({n: self._replicas[n] for n in self._names if n in self._replicas})
        return self._report

    def _apply(self, figures: _Figures, now_s: float) -> Change:
        """Store figures; return the kind of the changes."""
        self._report = None
        are_other = [self._update_replica(replica, now_s) for replica in figures.replicas]
        if len(self._replicas) > MAX_NAMES:
            raise ValueError(f"it reports more than {MAX_NAMES} replicas")
        holds_others = figures.held is not None and _positive(figures.held) != _positive(self._numbers["held"])
        numbers = {"queue": figures.queue, "held": figures.held, "requests": figures.requests}
        self._numbers |= {name: counts for name, counts in numbers.items() if counts is not None}
        return "held" if holds_others else "replicas" if any(are_other) else "numbers"

    def _update_replica(self, state: _ReplicaState, now_s: float) -> bool:
        """Store the state of a replica; return whether a value beside its load has changed."""
        new, before = _replica_of(state, now_s), self._replicas.get(state.name)
        if before is not None and (new.load, new.received) == (before.load, before.received):
            new = new._replace(load_s=before.load_s)
        self._replicas[state.name] = new
        return before is None or new[:NUM_STEADY] != before[:NUM_STEADY]

    def _make_report(self, known: dict[str, _Replica]) -> RouterReport:
        return RouterReport(
            pod=self._pod,
            start=self._start,
            admitted={name: r.epoch for name, r in known.items() if r.epoch},
            sizes={name: r.size for name, r in known.items() if r.size is not None},
            revisions={name: r.revision for name, r in known.items() if r.revision},
            startups={name: r.startup for name, r in known.items()},
            adapters={name: r.adapters for name, r in known.items() if r.adapters is not None},
            loads={name: r.load for name, r in known.items() if r.load is not None},
            load_times={name: r.load_s for name, r in known.items()},
            in_flight={name: r.in_flight for name, r in known.items()},
            worth_tokens={name: r.worth_tokens for name, r in known.items()},
            sends_to=frozenset(name for name, r in known.items() if not r.is_withdrawn),
            **self._numbers,
        )


def _event_of(data: bytes) -> _Event:
    try:
        event = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its state has an unknown format: {str(error)!r:.200}") from None
    if event.type == "state" and event.state is None:
        raise ValueError("its state has an unknown format: an event of type state has no `state`")
    return event


def _positive(counts: dict[str, int]) -> Set[str]:
    return {name for name, count in counts.items() if count}


def _replica_of(state: _ReplicaState, now_s: float) -> _Replica:
    load, model = state.load, state.model
    return _Replica(
        epoch=state.acknowledged_epoch,
        size=ModelSize(**asdict(model)) if model is not None and _are_counts(model) else None,
        revision=state.revision if len(state.revision) <= LONGEST_REVISION else "",
        startup=_startup_of(state.startup_s),
        is_withdrawn=state.withdrawn,
        adapters=None if state.adapter_file is None else _adapters_of(state.adapter_file),
        load=_load_of(load) if _are_counts(load) else None,
        in_flight=state.in_flight,
        worth_tokens=state.worth_tokens,
        received=load.received,
        load_s=now_s,
    )


def _adapters_of(file: _AdapterFile) -> AdapterReport:
    kept = islice(file.missing.items(), MAX_MISSING)
    return AdapterReport(file.digest[:LONGEST_TEXT], {name[:LONGEST_TEXT]: why[:LONGEST_TEXT] for name, why in kept})


def _are_counts(figures: _EngineLoad | _EngineModel) -> bool:
    return all(0 <= value <= MAX_COUNT for value in astuple(figures))


def _startup_of(given: dict[str, float | None]) -> dict[str, float]:
    """Return the phases that have a field in the status, because an engine of another version may report any others."""
    numbers = {phase: seconds for phase in ENGINE_PHASES if (seconds := given.get(phase)) is not None}
    return {phase: seconds for phase, seconds in numbers.items() if 0 <= seconds <= MOST_STARTUP_S}


def _load_of(load: _EngineLoad) -> Load:
    return Load(
        running=load.running,
        waiting=load.waiting,
        num_blocks=load.total_blocks,
        num_used_blocks=max(0, load.total_blocks - load.free_blocks - load.cached_blocks),
    )
