"""Adapters of an engine core: those that load on a thread, that requests may name, and that leave.

An adapter leaves when it is unloaded: new requests for it are rejected, and its memory is freed once its last request
has ended. `on_done` is called on another thread, so that an idle engine loop can sleep until an adapter is read.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from octavo_engine.wire.errors import EngineDead, InvalidRequest, OctavoError, StartupError, Unavailable
from octavo_engine.wire.sleep import ASLEEP, WAKE_RETRY_S

if TYPE_CHECKING:
    from octavo_engine.runner.executor import Executor

logger = logging.getLogger(__name__)

#: Receives the hash of an adapter, or why it could not be loaded.
Reply = Callable[[str | OctavoError], None]


class LoadedAdapters:
    def __init__(self, executor: "Executor", adapters: Iterable[str]) -> None:
        self.on_done: Callable[[], None] = _ignore
        self._executor = executor
        self._loaded = set(adapters)
        self._leaving: set[str] = set()
        self._done: deque[tuple[Future[object], Reply]] = deque()  # filled by other threads

    def __bool__(self) -> bool:
        """Return True if any request may have an adapter."""
        return bool(self._loaded or self._leaving)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._loaded

    def load(self, location: str) -> str:
        """Load an adapter and wait for it. Raises InvalidRequest, Unavailable and EngineDead."""
        adapter = self._add(self._prepare(location))
        if isinstance(adapter, OctavoError):
            raise adapter
        return adapter

    def start_loading(self, location: str, reply: Reply) -> None:
        """Read an adapter on a thread; `finish_loading` adds it and replies."""
        self._prepare(location).add_done_callback(lambda future: self._on_future_done(future, reply))

    def has_done(self) -> bool:
        return bool(self._done)

    def finish_loading(self, *, is_asleep: bool) -> None:
        while self._done:
            future, reply = self._done.popleft()
            reply(Unavailable(ASLEEP, retry_after_s=WAKE_RETRY_S) if is_asleep else self._add(future))

    def unload(self, adapter: str) -> None:
        if adapter in self._loaded:
            self._loaded.discard(adapter)
            self._leaving.add(adapter)

    def free_unused(self, adapters_in_use: Callable[[], Iterable[str]]) -> None:
        if self._leaving:
            for adapter in self._leaving.difference(adapters_in_use()):
                self._executor.remove_adapter(adapter)
                self._leaving.discard(adapter)

    def _prepare(self, location: str) -> "Future[object]":
        try:
            return self._executor.prepare_adapter(location)
        except StartupError as error:
            failed: Future[object] = Future()
            failed.set_exception(error)
            return failed

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
        self._loaded.add(adapter)
        return adapter

    def _on_future_done(self, future: "Future[object]", reply: Reply) -> None:
        self._done.append((future, reply))
        self.on_done()


def _ignore() -> None:
    """Do nothing: the default `on_done`, for an engine core that nothing loads adapters into while it is idle."""
