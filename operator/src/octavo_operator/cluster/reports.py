"""`RouterReports`: the state of the replicas, from each router's `GET /state/events` (docs/reference/router.md).

There is one connection per router pod, and nothing is polled. `on_change` is called when a report changes; if only the
load has changed, which varies constantly, at most every `LOAD_EVERY_S` seconds.

Tenants choose the images of routers, so a router may send anything. It gets a limited share of the operator's event
loop, reconciles and memory, and its figures of pods that are not behind it are ignored.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Set
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Literal, NamedTuple

import aiohttp
import msgspec
from msgspec import Meta
from msgspec.structs import asdict, astuple

from octavo_operator.observed import ENGINE_PHASES, AdapterReport, Load, ModelSize, RouterReport

logger = logging.getLogger(__name__)

Key = tuple[str, str]  # namespace, name of a pod
Address = tuple[str, int]  # IP, port
#: The kind of an event's changes: `numbers` if only figures that vary constantly have changed.
Change = Literal["held", "replicas", "numbers"]
SILENCE_S = 5.0  # a stream without data for so long has failed: routers send a heartbeat every second
RETRY_S, LAST_RETRY_S = 1.0, 60.0  # the delay doubles while a router sends what it should not
LOAD_EVERY_S = 15.0
CHANGES_BURST = 5  # changes that are published at once; then one a second, each with all changes so far
LONGEST_EVENT = 4 << 20  # bytes; enough for the state of a thousand replicas
MAX_NAMES = 4096
MAX_EVENTS_S = 50  # routers send a change every 0.2 s, and urgent ones at most every 25 ms
BURST_S = 10.0  # events that arrived while the operator did something else are read at once
#: Size of an event, and more for each engine pod behind the router. A larger event counts as several.
EVENT_BYTES, POD_BYTES = 16 << 10, 4 << 10
OBJECT_BYTES = 256  # size of a JSON object, if it is smaller: small ones take time, too
MAX_COUNT = 2**53
LONGEST_REVISION = 256
#: Number of missing adapters of a replica that are kept, and length to which their texts are cut.
MAX_MISSING, LONGEST_TEXT = 256, 256
MOST_STARTUP_S = 7 * 86400  # the status has it as an integer
FRESH_S = 3.0  # a router that was silent for longer may have missed changes: it sends a heartbeat every second


def router_session() -> aiohttp.ClientSession:
    """Make the session for `RouterReports`: it has a connection for each router, and leaves data compressed."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)


class RouterReports:
    """The latest report of each router pod. `on_change`: called with the pod's key when its report has changed.

    `session`: a `router_session`. `engines_of`: names of the engine pods that are behind the router of a router pod; a
    report has only these.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        on_change: Callable[[Key], None],
        *,
        engines_of: Callable[[Key], Set[str]],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._session = session
        self._on_change = on_change
        self._engines_of = engines_of
        self._clock = clock
        self._pause = pause
        self._streams: dict[Key, tuple[Address, asyncio.Task[None]]] = {}
        self._states: dict[Key, RouterState] = {}
        self._received_s: dict[Key, float] = {}

    def for_pods(self, namespace: str, pods: Iterable[str]) -> dict[str, RouterReport]:
        states = {pod: state for pod in pods if (state := self._states.get((namespace, pod))) is not None}
        return {pod: state.report(self._engines_of((namespace, pod))) for pod, state in states.items()}

    def fresh(self, namespace: str, pods: Iterable[str]) -> dict[str, RouterReport]:
        """The reports of those pods that sent a line in the last `FRESH_S` seconds."""
        now_s = self._clock()
        reports = self.for_pods(namespace, pods)
        return {pod: report for pod, report in reports.items() if now_s - self._received_s[namespace, pod] <= FRESH_S}

    def subscribe(self, key: Key, address: Address, secrets: Sequence[str] = ("",)) -> None:
        """Connect to a router pod. A new address replaces the connection: it is another pod with the same name.
        `secrets`: a router that answers 401 to one of them is sent the next one; an empty one is not sent."""
        stream = self._streams.get(key)
        if stream is None or stream[0] != address:
            self.unsubscribe(key)
            task = asyncio.create_task(self._run_stream(key, address, secrets))
            self._streams[key] = (address, task)

    def unsubscribe(self, key: Key) -> None:
        if (stream := self._streams.pop(key, None)) is not None:
            stream[1].cancel()
        self._states.pop(key, None)
        self._received_s.pop(key, None)

    async def aclose(self) -> None:
        tasks = [task for _, task in self._streams.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_stream(self, key: Key, address: Address, secrets: Sequence[str]) -> None:
        (host, port), in_turn = address, deque(secrets)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/state/events"
        budget, publishing, refused_s = EventBudget(self._clock()), PublishingLimit(self._clock()), RETRY_S
        while True:
            began_s, retry_s = self._clock(), RETRY_S
            try:
                await self._stream_once(key, url, in_turn[0], budget, publishing)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.info("the state stream of router %s/%s failed: %.200s", *key, error)
                if isinstance(error, aiohttp.ClientResponseError) and error.status == HTTPStatus.UNAUTHORIZED:
                    in_turn.rotate(-1)
            except ValueError as error:
                if self._clock() - began_s >= LAST_RETRY_S:
                    refused_s = RETRY_S
                if refused_s == RETRY_S:
                    logger.warning(_REFUSED, *key, error, LAST_RETRY_S)
                retry_s, refused_s = refused_s, min(2 * refused_s, LAST_RETRY_S)
            if self._states.pop(key, None) is not None:
                self._on_change(key)
            await self._pause(retry_s)

    async def _stream_once(
        self, key: Key, url: str, secret: str, budget: "EventBudget", publishing: "PublishingLimit"
    ) -> None:
        """Read one stream to its end. Raises ValueError if the router sends something else or too much."""
        headers = {"Accept-Encoding": "identity"} | ({"x-octavo-secret": secret} if secret else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        state, pending, changes = RouterState(key[1]), bytearray(), set[Change]()
        async with self._session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as answer:
            answer.raise_for_status()
            if answer.status != 200:
                raise ValueError(f"its answer has the status {answer.status}, not 200")
            while chunk := await answer.content.readany():  # `readline` needs quadratic time for tiny pieces
                pending += chunk
                for event in split_events(pending, len(chunk)):
                    now_s = self._received_s[key] = self._clock()
                    budget.spend(event, num_pods=len(self._engines_of(key)), now_s=now_s)
                    changed = state.update(event[5:], now_s) if event.startswith(b"data:") else None
                    if changed is not None:
                        self._states[key] = state
                        changes.add(changed)
                    if publishing.allows(changes, now_s):
                        changes.clear()
                        self._on_change(key)


_REFUSED = (
    "the state stream of router %s/%s was closed: %s. Until it is read again, after up to %g s, new replicas "
    "behind the router are not admitted"
)


def split_events(pending: bytearray, num_new: int) -> Iterator[bytes]:
    """Remove the events that are whole from a stream's bytes and return them. `num_new`: bytes since the last call."""
    searched = max(0, len(pending) - num_new - 1)
    while (end := pending.find(b"\n\n", searched)) >= 0:
        event = bytes(pending[:end])
        del pending[: end + 2]
        searched = 0
        yield event
    if len(pending) > LONGEST_EVENT:
        raise ValueError(f"one of its events has more than {LONGEST_EVENT} bytes")


class EventBudget:
    """Events that a router may send: `MAX_EVENTS_S` a second, on average over `BURST_S` seconds."""

    def __init__(self, now_s: float) -> None:
        self._left = MAX_EVENTS_S * BURST_S
        self._at_s = now_s

    def spend(self, event: bytes, *, num_pods: int, now_s: float) -> None:
        """Count an event. `num_pods`: number of engine pods behind the router. Raises ValueError beyond the budget."""
        earned, self._at_s = (now_s - self._at_s) * MAX_EVENTS_S, now_s
        num_bytes, limit = len(event) + event.count(b"{") * OBJECT_BYTES, EVENT_BYTES + num_pods * POD_BYTES
        self._left = min(self._left + earned, MAX_EVENTS_S * BURST_S) - 1 - num_bytes // limit
        if self._left < 0:
            raise ValueError(f"it sends more than {MAX_EVENTS_S} events a second (of up to {limit} bytes each)")


class PublishingLimit:
    """Publications for a router: changes of replicas, and changes of held requests, up to `CHANGES_BURST` at once and
    one a second on average; changes of numbers alone every `LOAD_EVERY_S`."""

    def __init__(self, now_s: float) -> None:
        self._left: dict[Change, float] = {"held": CHANGES_BURST, "replicas": CHANGES_BURST}
        self._at_s, self._published_s = now_s, float("-inf")

    def allows(self, changes: Set[Change], now_s: float) -> bool:
        """Return whether changes that are not yet published may be published now, and count that."""
        self._left = {kind: min(left + now_s - self._at_s, CHANGES_BURST) for kind, left in self._left.items()}
        self._at_s = now_s
        kind = next((kind for kind, left in self._left.items() if kind in changes and left >= 1), None)
        if not changes or (kind is None and now_s - self._published_s < LOAD_EVERY_S):
            return False
        if kind is not None:
            self._left[kind] -= 1
        self._published_s = now_s
        return True


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
    """The figures of a replica that can be used: None, or left out, if they are unknown or impossible."""

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

        `now_s`: monotonic time. Raises ValueError for an unknown format, as of a router of another version.
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
    """The phases that the status has fields for: an engine of another version may report other phases, or nonsense."""
    numbers = {phase: seconds for phase in ENGINE_PHASES if (seconds := given.get(phase)) is not None}
    return {phase: seconds for phase, seconds in numbers.items() if 0 <= seconds <= MOST_STARTUP_S}


def _load_of(load: _EngineLoad) -> Load:
    return Load(
        running=load.running,
        waiting=load.waiting,
        num_blocks=load.total_blocks,
        num_used_blocks=max(0, load.total_blocks - load.free_blocks - load.cached_blocks),
    )
