"""`AdapterNames`: the names of the adapters of an engine core in another process; the core knows only their hashes."""

import asyncio
from dataclasses import dataclass

from octavo_engine.config import EngineConfig, ReadyInfo
from octavo_engine.process.client import CoreProcess
from octavo_engine.wire.errors import InvalidRequest, ModelNotFound

#: Reading a large adapter from a slow disk takes minutes. A dead core ends the call at once.
CALL_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """`hash`: of the content. `path`: the folder as it was given. `parent`: a name of the base model, if it is set."""

    hash: str
    path: str
    parent: str | None = None


class AdapterNames:
    """`by_name`: the adapters that requests may name. Changes are made one after another."""

    def __init__(self, core: CoreProcess, config: EngineConfig, ready: ReadyInfo) -> None:
        self.by_name = {
            module.name: NamedAdapter(ready.adapters[module.name], module.path, module.base_model_name)
            for module in config.lora_modules
        }
        self._core = core
        self._lock = asyncio.Lock()

    def hash_of(self, name: str) -> str:
        """Return the hash of an adapter, "" for the name "" of the base model. Raises ModelNotFound."""
        if name and name not in self.by_name:
            raise ModelNotFound(name)
        return self.by_name[name].hash if name else ""

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter under a name that is free, or replace the adapter of the name. Raises InvalidRequest."""
        async with self._lock:
            old = self.by_name.get(name)
            if old is not None and not in_place:
                raise InvalidRequest(f"the adapter {name!r} is already loaded: choose another name.", param="lora_name")
            loaded = await self._core.call_adapter("load_adapter", path, timeout_s=CALL_TIMEOUT_S)
            assert isinstance(loaded, str)
            self.by_name[name] = NamedAdapter(loaded, path)
            if old is not None:
                await self._unload_unnamed(old)

    async def unload(self, name: str) -> None:
        """Remove a name; the core frees the adapter after its last request. Raises ModelNotFound."""
        async with self._lock:
            old = self.by_name.pop(name, None)
            if old is None:
                raise ModelNotFound(name)
            await self._unload_unnamed(old)

    async def _unload_unnamed(self, old: NamedAdapter) -> None:
        if all(adapter.hash != old.hash for adapter in self.by_name.values()):
            await self._core.call_adapter("unload_adapter", old.hash)
