"""Adapters of an engine core: those that load on threads, that requests may name, and that leave.

`MAX_LOADS` loads read at once; further ones wait in order. A load whose source gives no byte for `STALL_S`, or that its
caller ends, is over at once. Its thread may hang in the source: it ends with its next byte, and its result is dropped.

An adapter leaves when it was unloaded as often as loaded: new requests for it are rejected, and its memory is freed
once its last request has ended. `on_done` is called on another thread, so that an idle engine loop can sleep until an
adapter is read.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from octavo_engine.sources.progress import TimedRead
from octavo_engine.wire.errors import EngineDead, InvalidRequest, OctavoError, StartupError, Unavailable
from octavo_engine.wire.sleep import ASLEEP, WAKE_RETRY_S

if TYPE_CHECKING:
    from octavo_engine.runner.executor import Executor

logger = logging.getLogger(__name__)

MAX_LOADS, MAX_STUCK = 8, 32

#: Receives the hash of an adapter, or why it could not be loaded.
Reply = Callable[[str | OctavoError], None]


class AdapterLoad(TimedRead):
    """States: waiting, reading (it has a future), ended."""

    def __init__(self, location: str, reply: Reply, clock: Callable[[], float]) -> None:
        super().__init__(f"adapter {location}", clock)
        self.location, self.reply = location, reply
        self.future: Future[object] | None = None

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


class LoadedAdapters:
    """`adapters`: the hashes of those that the start has loaded, each as often as names have it."""

    def __init__(self, executor: "Executor", adapters: Iterable[str], clock: Callable[[], float]) -> None:
        self.on_done: Callable[[], None] = _ignore
        self._executor, self._clock = executor, clock
        self._loaded = Counter(adapters)
        self._leaving: set[str] = set()
        self._loads: dict[Hashable, AdapterLoad] = {}  # in order of their calls
        self._stuck: list[Future[object]] = []  # of ended loads

    def __bool__(self) -> bool:
        """Return True if any request may have an adapter."""
        return bool(self._loaded or self._leaving)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._loaded

    def load(self, location: str) -> str:
        """Load an adapter and wait for it. Raises InvalidRequest, Unavailable and EngineDead."""
        replies: list[str | OctavoError] = []
        self.start_loading(location, location, replies.append)
        try:
            while not replies:
                futures = [load.future for load in self._loads.values() if load.future is not None]
                wait(futures, max(0.0, (self.next_deadline_s() or 0.0) - self._clock()))
                self.finish_loading(is_asleep=False)
        finally:
            self.end_loading(location)  # after an interrupt
        if isinstance(replies[0], OctavoError):
            raise replies[0]
        return replies[0]

    def start_loading(self, load_id: Hashable, location: str, reply: Reply) -> None:
        """Read an adapter on a thread; `finish_loading` adds it and replies."""
        if len(self._stuck) >= MAX_STUCK:
            text = f"{len(self._stuck)} loads that have ended still hang in their sources; the limit is {MAX_STUCK}: "
            reply(Unavailable(text + "repair the volume, or restart the engine.", retry_after_s=WAKE_RETRY_S))
            return
        self._loads[load_id] = AdapterLoad(location, reply, self._clock)
        self._start_waiting()

    def end_loading(self, load_id: Hashable) -> None:
        """End a load, unless it has ended: its caller has left."""
        if (load := self._loads.get(load_id)) is not None:
            reason = f"adapter {load.location}: its load was ended: load it again."
            self._end(load_id, Unavailable(reason, retry_after_s=WAKE_RETRY_S))
            self._start_waiting()

    def has_done(self) -> bool:
        return any(load.is_done for load in self._loads.values())

    def next_deadline_s(self) -> float | None:
        """Return the time at which the next load ends, unless its source gives a byte before."""
        return min((load.stalls_at_s for load in self._reading()), default=None)

    def finish_loading(self, *, is_asleep: bool) -> None:
        self._stuck = [future for future in self._stuck if not future.done()]
        for load_id, load in list(self._loads.items()):
            if load.future is None:
                continue
            if load.future.done():
                asleep = Unavailable(ASLEEP, retry_after_s=WAKE_RETRY_S) if is_asleep else None
                self._end(load_id, asleep or self._add(load.future))
            elif load.stalls_at_s <= self._clock():
                self._end(load_id, load.stall_error())
        self._start_waiting()

    def unload(self, adapter: str) -> None:
        if adapter in self._loaded:
            self._loaded[adapter] -= 1
            if not self._loaded[adapter]:
                del self._loaded[adapter]
                self._leaving.add(adapter)

    def free_unused(self, adapters_in_use: Callable[[], Iterable[str]]) -> None:
        if self._leaving:
            for adapter in self._leaving.difference(adapters_in_use()):
                self._executor.remove_adapter(adapter)
                self._leaving.discard(adapter)

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

    def _add(self, future: "Future[object]") -> str | OctavoError:
        try:
            adapter = self._executor.add_adapter(future.result())
        except StartupError as error:
            return InvalidRequest(str(error), param="lora_path")
        except EngineDead:  # a rank has ended
            raise
        except Exception as error:  # an adapter must not end the engine
            logger.exception("an adapter could not be loaded")
            return Unavailable(f"the adapter could not be loaded: {error!r}: see the log.", retry_after_s=WAKE_RETRY_S)
        self._leaving.discard(adapter)
        self._loaded[adapter] += 1
        return adapter


def _ignore() -> None:
    """Do nothing: the default `on_done`, for an engine core that nothing loads adapters into while it is idle."""
