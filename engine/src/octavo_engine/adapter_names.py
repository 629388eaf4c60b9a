"""`AdapterNames`: the names of the adapters of an engine core in another process; the core knows only their hashes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from octavo_engine.config import EngineConfig, ReadyInfo
from octavo_engine.lora_args import MAX_NAME_BYTES
from octavo_engine.process.client import CoreProcess
from octavo_engine.wire.errors import InvalidRequest, ModelNotFound

#: Reading a large adapter from a slow disk takes minutes. A dead core ends the call at once.
CALL_TIMEOUT_S = 1800.0

#: Called with the hashes of all adapters, by name.
OnChange = Callable[[dict[str, str]], None]


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
        self._core, self._max_loras = core, config.max_loras
        self._lock = asyncio.Lock()

    def hash_of(self, name: str) -> str:
        """Return the hash of an adapter, "" for the name "" of the base model. Raises ModelNotFound."""
        if name and name not in self.by_name:
            raise ModelNotFound(name)
        return self.by_name[name].hash if name else ""

    async def load(self, name: str, path: str, *, in_place: bool, on_change: OnChange | None) -> None:
        """Load an adapter under a name that is free, or replace the adapter of the name. Raises InvalidRequest."""
        async with self._lock:
            old = self.by_name.get(name)
            if old is not None and not in_place:
                raise InvalidRequest(f"the adapter {name!r} is already loaded: choose another name.", param="lora_name")
            self._check_new(name, is_new=old is None)
            loaded = await self._core.call_adapter("load_adapter", path, timeout_s=CALL_TIMEOUT_S)
            assert isinstance(loaded, str)
            self.by_name[name] = NamedAdapter(loaded, path)
            self._publish(on_change)
            if old is not None:
                await self._unload_unnamed(old)

    def _check_new(self, name: str, *, is_new: bool) -> None:
        if (size := len(name.encode())) > MAX_NAME_BYTES:
            raise InvalidRequest(
                f"the name of the adapter has {size} bytes; the limit is {MAX_NAME_BYTES}: choose a shorter one.",
                param="lora_name",
            )
        if is_new and len(self.by_name) >= self._max_loras:
            raise InvalidRequest(
                f"{len(self.by_name)} names of adapters are in use; the limit is --max-loras {self._max_loras}: unload "
                "one, or raise it.",
                param="lora_name",
            )

    async def unload(self, name: str, *, on_change: OnChange | None) -> None:
        """Remove a name; the core frees the adapter after its last request. Raises ModelNotFound."""
        async with self._lock:
            old = self.by_name.pop(name, None)
            if old is None:
                raise ModelNotFound(name)
            self._publish(on_change)
            await self._unload_unnamed(old)

    def _publish(self, on_change: OnChange | None) -> None:
        if on_change is not None:
            on_change({name: adapter.hash for name, adapter in self.by_name.items()})

    async def _unload_unnamed(self, old: NamedAdapter) -> None:
        if all(adapter.hash != old.hash for adapter in self.by_name.values()):
            await self._core.call_adapter("unload_adapter", old.hash)
