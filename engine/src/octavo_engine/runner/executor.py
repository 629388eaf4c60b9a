"""Executors run plans. `submit` returns a future, so that other executors may have several plans in flight.

`LocalExecutor` starts a plan in this process, on the caller's thread; the kernels have their own compute threads. A CPU
has run the plan when `submit` returns.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from octavo_engine.grammar.compiler import GrammarCompiler
from octavo_engine.media.processed_images import ProcessedImages
from octavo_engine.runner.adapters import Adapters, PreparedAdapter
from octavo_engine.runner.engine_memory import EngineMemory
from octavo_engine.runner.image_encoder import ImageEncoder
from octavo_engine.runner.lora_terms import tensors_of_bytes
from octavo_engine.runner.runner import Runner
from octavo_engine.sources.adapter import AdapterFiles
from octavo_engine.sources.progress import Advance, read_on_thread
from octavo_engine.wire.errors import EngineDead, StartupError
from octavo_engine.wire.plan import StepPlan, StepResult
from octavo_engine.wire.sleep import MemoryTag


class ReadAdapter(Protocol):
    """An adapter that was read. `hash`: of its content. `folder`: has its files."""

    @property
    def hash(self) -> str: ...

    @property
    def folder(self) -> Path: ...


class Executor(Protocol):
    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        """Run a plan; plans run in the order of submission. The future fails only if the executor is lost."""
        ...

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        """Set a function that is called, on any thread, if the executor is lost while it runs no plan."""
        ...

    def prepare(self, grammar: str) -> "Future[object]":
        """Compile a grammar. Plans may use it when the future is done and as long as its result is kept."""
        ...

    @property
    def images(self) -> ProcessedImages | None:
        """The processed images of requests, to which plans may refer. None if the model takes no images."""
        ...

    def prepare_adapter(self, location: str, advance: Advance) -> "Future[ReadAdapter]":
        """Read an adapter on a thread of its own, beside plans. Both the call and its future may raise StartupError."""
        ...

    def add_adapter(self, prepared: ReadAdapter) -> None:
        """Keep the result of `prepare_adapter` in memory; sequences may then name its hash. Raises StartupError."""
        ...

    def remove_adapter(self, adapter: str) -> None:
        """Free the memory of an adapter that no sequence names any more."""
        ...

    def release(self, tag: MemoryTag) -> None:
        """Give a part of the memory back; no plan runs until `restore`."""
        ...

    def restore(self, tag: MemoryTag) -> None:
        """Restore released weights, or an empty KV cache. If it raises, the memory is still released."""
        ...

    def shutdown(self, reason: str | None = None) -> None:
        """Free everything. `reason`: the error that ends the engine, for other hosts; None: a user stops it."""
        ...


class CollectedResult(Future[StepResult]):
    """A future of a started step, which waits for the device on the thread that asks for the result."""

    def __init__(self, collect: Callable[[], StepResult]) -> None:
        super().__init__()
        self._collect = collect

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            self.set_result(self._collect())
        return super().result(timeout)


class LocalExecutor:
    def __init__(
        self,
        runner: Runner,
        grammars: GrammarCompiler,
        memory: EngineMemory,
        adapters: Adapters | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self._runner: Runner | None = runner
        self._grammars = grammars
        self._memory: EngineMemory | None = memory
        self._adapters = adapters
        self._images = images

    def submit(self, plan: StepPlan) -> "Future[StepResult]":
        if self._runner is not None:
            return CollectedResult(self._runner.start(plan))
        future: Future[StepResult] = Future()
        future.set_exception(RuntimeError("the executor has been shut down"))
        return future

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        """Do nothing: a device is lost while it runs a plan."""

    def prepare(self, grammar: str) -> "Future[object]":
        return cast("Future[object]", self._grammars.submit(grammar))

    @property
    def images(self) -> ProcessedImages | None:
        return None if self._images is None else self._images.processed

    def prepare_adapter(self, location: str, advance: Advance) -> "Future[ReadAdapter]":
        if self._adapters is None:
            raise StartupError(f"adapter {location}: adapters need --enable-lora: add it.")
        return cast("Future[ReadAdapter]", read_on_thread(partial(self._adapters.prepare, location, advance)))

    def add_adapter(self, prepared: ReadAdapter) -> None:
        assert self._adapters is not None, "an adapter was prepared"
        assert isinstance(prepared, PreparedAdapter)
        self._adapters.add(prepared)

    def add_read_adapter(self, files: AdapterFiles, tensors: Mapping[str, bytearray], adapter: str) -> None:
        """Pack and add the adapter that rank 0 has read, whose hash is `adapter`. Raises StartupError."""
        assert self._adapters is not None, "rank 0 has read an adapter"
        self._adapters.add(self._adapters.pack(files, tensors_of_bytes(files, tensors), adapter))

    def remove_adapter(self, adapter: str) -> None:
        if self._adapters is not None:
            self._adapters.remove(adapter)

    def release(self, tag: MemoryTag) -> None:
        if self._memory is not None:
            self._memory.release(tag)

    def restore(self, tag: MemoryTag) -> None:
        if self._memory is not None:
            self._memory.restore(tag)

    def shutdown(self, reason: str | None = None) -> None:
        """Free the weights and the KV cache, and stop compiling grammars and decoding images."""
        device = None if self._memory is None else self._memory.device
        self._runner = self._memory = self._adapters = None
        self._grammars.shutdown()
        if self._images is not None:
            self._images.processed.shutdown()
        if device is not None:
            device.release_unused_memory()
