"""Adapters of an engine core: those that requests may name, those in memory, and the reads that load adapters.

An adapter may be loaded several times; requests may name it until it has been unloaded as often. At most
`max_in_memory` adapters are in memory. A request for another adapter waits while that adapter is read beside the steps,
and replaces the least recently used adapter that has no requests. Adapters enter memory in the order of requests: while
one waits for space, all later requests for adapters wait, too, even if their adapter is in memory, so that space
becomes free. Requests without an adapter never wait here.

`MAX_LOADS` reads run at once; others wait in order. A read fails if its source sends no byte for `STALL_S` seconds, or
if all of its callers have gone. Its thread may hang until the next byte arrives; the result is then dropped. An
unloaded adapter is freed once its last request has ended.

`on_done` is called on another thread once an adapter was read, to wake an idle engine loop.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from octavo_engine.sources.progress import TimedRead
from octavo_engine.wire.errors import EngineDead, InvalidRequest, OctavoError, StartupError, Unavailable
from octavo_engine.wire.sleep import ASLEEP, WAKE_RETRY_S

if TYPE_CHECKING:
    from octavo_engine.runner.executor import Executor, ReadAdapter

logger = logging.getLogger(__name__)

MAX_LOADS, MAX_STUCK = 8, 32

#: Receives the hash of an adapter, or why it could not be loaded.
Reply = Callable[[str | OctavoError], None]


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """One load of an adapter. `location`: as the caller gave it. `folder`: the folder on this machine from which it was
    read."""

    location: str
    folder: str


class AdapterLoad(TimedRead):
    """States: waiting; reading, with a future; ended. `accept`: takes what was read; may raise StartupError."""

    def __init__(
        self, location: str, accept: "Callable[[ReadAdapter], None]", reply: Reply, clock: Callable[[], float]
    ) -> None:
        super().__init__(f"adapter {location}", clock)
        self.location, self.accept, self.reply = location, accept, reply
        self.future: Future[ReadAdapter] | None = None

    def start(self, executor: "Executor", on_done: Callable[[], None]) -> None:
        self._advanced_s = self._clock()
        try:
            self.future = executor.prepare_adapter(self.location, self.advance)
        except StartupError as error:
            self.future = Future()
            self.future.set_exception(error)
        self.future.add_done_callback(lambda _: on_done())

    @property
    def is_done(self) -> bool:
        return self.future is not None and self.future.done()

    def stall_error(self) -> Unavailable:
        return Unavailable(f"{self.stall_text()}, then load it again.", retry_after_s=WAKE_RETRY_S)


@dataclass(slots=True)
class _WantedAdapter:
    """An adapter to be read into memory. `waiting`: requests by id. `folders`: the folders that were not tried yet."""

    waiting: "dict[str, Future[object]]" = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    has_place: bool = False


class LoadedAdapters:
    """`start`: hashes and sources of the adapters that are loaded at the start, of which the first `max_in_memory` are
    in memory."""

    def __init__(
        self,
        executor: "Executor",
        clock: Callable[[], float],
        *,
        max_in_memory: int,
        start: Iterable[tuple[str, AdapterSource]] = (),
    ) -> None:
        self.on_done: Callable[[], None] = _ignore
        self._executor, self._clock, self._max_in_memory = executor, clock, max_in_memory
        self._sources: dict[str, list[AdapterSource]] = {}  # of loads without an unload, by hash
        for adapter, source in start:
            self._sources.setdefault(adapter, []).append(source)
        self._in_memory = dict.fromkeys([*self._sources][:max_in_memory])  # least recently used first
        self._leaving: set[str] = set()  # unloaded adapters that requests still use
        self._requests: dict[str, str] = {}  # unfinished request's id -> adapter
        self._num_users: Counter[str] = Counter()  # adapter -> requests that use it
        self._wanted: dict[str, _WantedAdapter] = {}  # ordered by the adapters' first requests
        self._loads: dict[Hashable, AdapterLoad] = {}  # ordered by call
        self._stuck: list[Future[ReadAdapter]] = []  # reads that still run after their loads have ended

    def __bool__(self) -> bool:
        """Return True if any request may have an adapter."""
        return bool(self._sources)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._sources and adapter not in self._leaving

    def is_ready(self, adapter: str) -> bool:
        """Return whether a request for this adapter can run at once. "": a request without an adapter."""
        return not adapter or (adapter in self._in_memory and not self._is_full())

    def acquire(self, request_id: str, adapter: str) -> "Future[object] | None":
        """Keep an adapter in memory until `release`. Return a future if the request must wait until it is in memory."""
        self._requests[request_id] = adapter
        if self.is_ready(adapter):
            self._use(adapter)
            return None
        future: Future[object] = Future()
        self._wanted.setdefault(adapter, _WantedAdapter()).waiting[request_id] = future
        self._give_places()
        return future

    def release(self, request_id: str) -> None:
        """Undo `acquire` for a request that has ended, if it has an adapter."""
        adapter = self._requests.pop(request_id, "")
        if not adapter:
            return
        wanted = self._wanted.get(adapter)
        if wanted is None or wanted.waiting.pop(request_id, None) is None:
            self._use(adapter, -1)
        elif not wanted.waiting:
            del self._wanted[adapter]
            self.end_loading(_read_id(adapter))
        self._free_if_unused(adapter)
        self._give_places()

    def load(self, location: str) -> str:
        """Load an adapter and wait for it. Raises InvalidRequest, Unavailable and EngineDead."""
        replies: list[str | OctavoError] = []
        self.start_loading(location, location, replies.append)
        try:
            while not replies:
                wait(self.futures(), max(0.0, (self.next_deadline_s() or 0.0) - self._clock()))
                self.finish_loading(is_asleep=False)
        finally:
            self.end_loading(location)  # after an interrupt
        if isinstance(replies[0], OctavoError):
            raise replies[0]
        return replies[0]

    def start_loading(self, load_id: Hashable, location: str, reply: Reply) -> None:
        """Read an adapter on a thread; `finish_loading` adds it and replies."""
        if (error := self._stuck_error()) is not None:
            reply(error)
            return
        self._start(load_id, AdapterLoad(location, partial(self._add, location), reply, self._clock))

    def end_loading(self, load_id: Hashable) -> None:
        """End a load whose caller has left, unless it has ended."""
        if (load := self._loads.get(load_id)) is not None:
            reason = f"adapter {load.location}: its load was ended: load it again."
            self._end(load_id, Unavailable(reason, retry_after_s=WAKE_RETRY_S))
            self._start_waiting()

    def has_done(self) -> bool:
        return any(load.is_done for load in self._loads.values())

    def futures(self) -> "list[Future[ReadAdapter]]":
        """Return the futures of the reads in progress."""
        return [load.future for load in self._loads.values() if load.future is not None]

    def next_deadline_s(self) -> float | None:
        """Return the earliest time at which a load fails if its source sends no byte until then."""
        return min((load.stalls_at_s for load in self._reading()), default=None)

    def finish_loading(self, *, is_asleep: bool) -> None:
        self._stuck = [future for future in self._stuck if not future.done()]
        for load_id, load in list(self._loads.items()):
            if load.future is None:
                continue
            if load.future.done():
                asleep = Unavailable(ASLEEP, retry_after_s=WAKE_RETRY_S) if is_asleep else None
                self._end(load_id, asleep or self._accept(load, load.future))
            elif load.stalls_at_s <= self._clock():
                self._end(load_id, load.stall_error())
        self._start_waiting()

    def unload(self, adapter: str, location: str) -> None:
        """Undo one load from a location."""
        if adapter not in self:
            return
        sources = self._sources[adapter]
        if len(sources) > 1:
            sources.remove(next((source for source in sources if source.location == location), sources[0]))
            return
        self._leaving.add(adapter)
        self._free_if_unused(adapter)
        self._give_places()

    def forget_memory(self) -> None:
        """Record that no adapter is in memory after a sleep: each is read again for its next request."""
        self._in_memory.clear()

    def _is_full(self) -> bool:
        """Return True if an adapter waits for a place."""
        return not all(wanted.has_place for wanted in self._wanted.values())

    def _use(self, adapter: str, num_requests: int = 1) -> None:
        self._num_users[adapter] += num_requests
        if adapter in self._in_memory:
            self._in_memory[adapter] = self._in_memory.pop(adapter)

    def _give_places(self) -> None:
        """Bring adapters into memory for waiting requests, in order, up to the first adapter that must wait for
        space."""
        for adapter, wanted in list(self._wanted.items()):
            if wanted.has_place:
                continue
            if adapter in self._in_memory:
                self._end_wait(adapter, None)
            elif self._make_place():
                wanted.has_place = True
                wanted.folders = list(dict.fromkeys(source.folder for source in self._sources[adapter]))
                self._read_again(adapter, wanted)
            else:
                return

    def _make_place(self) -> bool:
        """Make space for an adapter in memory, by removing another if necessary; return False if all are in use."""
        if len(self._in_memory) + sum(wanted.has_place for wanted in self._wanted.values()) < self._max_in_memory:
            return True
        unused = next((adapter for adapter in self._in_memory if not self._num_users[adapter]), None)
        if unused is None:
            return False
        self._remove(unused)
        return True

    def _read_again(self, adapter: str, wanted: _WantedAdapter) -> None:
        """Read an adapter again, from its newest folder that was not tried yet; its content hash must be the same."""
        folder = wanted.folders.pop()

        def accept(prepared: "ReadAdapter") -> None:
            if prepared.hash != adapter:
                raise StartupError(f"adapter {folder}: its files have changed since it was loaded: load it again.")
            self._executor.add_adapter(prepared)
            self._in_memory[adapter] = None

        def reply(result: str | OctavoError) -> None:
            if self._wanted.get(adapter) is not wanted:  # all its requests have ended
                return
            if isinstance(result, OctavoError) and wanted.folders:
                self._read_again(adapter, wanted)
            elif isinstance(result, OctavoError):
                self._end_wait(adapter, result)
                self._give_places()
            else:
                self._end_wait(adapter, None)

        if (error := self._stuck_error()) is not None:
            self._end_wait(adapter, error)
        else:
            self._start(_read_id(adapter), AdapterLoad(folder, accept, reply, self._clock))

    def _end_wait(self, adapter: str, error: OctavoError | None) -> None:
        for future in self._wanted.pop(adapter).waiting.values():
            self._use(adapter)
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(Unavailable(str(error), retry_after_s=WAKE_RETRY_S))

    def _remove(self, adapter: str) -> None:
        del self._in_memory[adapter]
        self._executor.remove_adapter(adapter)

    def _free_if_unused(self, adapter: str) -> None:
        if adapter in self._leaving and not self._num_users[adapter] and adapter not in self._wanted:
            self._leaving.discard(adapter)
            del self._sources[adapter], self._num_users[adapter]
            if adapter in self._in_memory:
                self._remove(adapter)

    def _stuck_error(self) -> Unavailable | None:
        if len(self._stuck) < MAX_STUCK:
            return None
        text = f"{len(self._stuck)} failed loads still wait for their sources; the limit is {MAX_STUCK}: "
        return Unavailable(text + "repair the volume, or restart the engine.", retry_after_s=WAKE_RETRY_S)

    def _start(self, load_id: Hashable, load: AdapterLoad) -> None:
        self._loads[load_id] = load
        self._start_waiting()

    def _reading(self) -> list[AdapterLoad]:
        return [load for load in self._loads.values() if load.future is not None]

    def _start_waiting(self) -> None:
        num_reading = len(self._reading())
        for load in self._loads.values():
            if load.future is None and num_reading < MAX_LOADS:
                load.start(self._executor, self.on_done)
                num_reading += 1

    def _end(self, load_id: Hashable, result: str | OctavoError) -> None:
        load = self._loads.pop(load_id)
        load.is_ended = True
        if load.future is not None and not load.future.done():
            self._stuck.append(load.future)
        load.reply(result)

    def _accept(self, load: AdapterLoad, future: "Future[ReadAdapter]") -> str | OctavoError:
        try:
            prepared = future.result()
            load.accept(prepared)
        except StartupError as error:
            return InvalidRequest(str(error), param="lora_path")
        except EngineDead:  # a rank has ended
            raise
        except Exception as error:  # an adapter must not end the engine
            logger.exception("an adapter could not be loaded")
            return Unavailable(f"the adapter could not be loaded: {error!r}: see the log.", retry_after_s=WAKE_RETRY_S)
        return prepared.hash

    def _add(self, location: str, prepared: "ReadAdapter") -> None:
        """Let requests name an adapter that was read. It stays in memory unless another adapter waits for space."""
        adapter = prepared.hash
        is_needed = adapter not in self._in_memory and adapter not in self._wanted
        if is_needed and not self._is_full() and self._make_place():
            self._executor.add_adapter(prepared)
            self._in_memory[adapter] = None
        if adapter in self._leaving:
            self._leaving.discard(adapter)
            self._sources[adapter].clear()
        self._sources.setdefault(adapter, []).append(AdapterSource(location, str(prepared.folder)))


def _read_id(adapter: str) -> Hashable:
    """Return the id of a read for requests; it differs from all ids of `start_loading`."""
    return "read again", adapter


def _ignore() -> None:
    """Do nothing. Default of `on_done` for an engine core that loads no adapters while it is idle."""
