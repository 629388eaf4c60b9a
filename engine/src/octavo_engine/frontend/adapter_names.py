"""`AdapterNames`: the names of the adapters of an engine core in another process; the core knows only their hashes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from octavo_engine.process.client import CoreProcess
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.lora import check_adapter_name, check_num_adapters
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.errors import AdapterNameTaken, InvalidRequest, ModelNotFound, StartupError

#: Called with the hashes of all adapters, by name.
OnChange = Callable[[dict[str, str]], None]


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """`hash`: of the content. `path`: the folder as it was given. `parent`: a name of the base model, if it is set."""

    hash: str
    path: str
    parent: str | None = None


class AdapterNames:
    """`by_name`: the adapters that requests may name. Changes of one name are made one after another.

    The core counts loads by content; each name is one load.
    """

    def __init__(self, core: CoreProcess, config: EngineConfig, ready: ReadyInfo) -> None:
        self.by_name = {
            module.name: NamedAdapter(ready.adapters[module.name], module.path, module.base_model_name)
            for module in config.lora_modules
        }
        self._core = core
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name, while in use
        self._coming: set[str] = set()  # names of running loads

    def hash_of(self, name: str) -> str:
        """Return the hash of an adapter, "" for the name "" of the base model. Raises ModelNotFound."""
        if name and name not in self.by_name:
            raise ModelNotFound(name)
        return self.by_name[name].hash if name else ""

    async def load(self, name: str, path: str, *, in_place: bool, on_change: OnChange | None) -> None:
        """Load an adapter under a name that is free, or replace the adapter of the name.

        If the call is cancelled, nothing is loaded. Raises InvalidRequest and Unavailable.
        """
        async with self._lock_of(name):
            old = self.by_name.get(name)
            if old is not None and not in_place:
                raise AdapterNameTaken(name)
            self._check_new(name)
            self._coming.add(name)
            try:
                loaded = await self._core.load_adapter(path)
            finally:
                self._coming.discard(name)
            self.by_name[name] = NamedAdapter(loaded, path)
            self._publish(on_change)
            if old is not None:
                await self._core.unload_adapter(old.hash, old.path)

    def _check_new(self, name: str) -> None:
        try:
            check_adapter_name(name)
            check_num_adapters(len(self.by_name.keys() | self._coming | {name}))
        except StartupError as error:
            raise InvalidRequest(str(error), param="lora_name") from None

    async def unload(self, name: str, *, on_change: OnChange | None) -> None:
        """Remove a name; the core frees the adapter after its last request. Raises ModelNotFound."""
        async with self._lock_of(name):
            old = self.by_name.pop(name, None)
            if old is None:
                raise ModelNotFound(name)
            self._publish(on_change)
            await self._core.unload_adapter(old.hash, old.path)

    def _lock_of(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _publish(self, on_change: OnChange | None) -> None:
        if on_change is not None:
            on_change({name: adapter.hash for name, adapter in self.by_name.items()})
