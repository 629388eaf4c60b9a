"""Interface of an engine as the HTTP handlers use it; implemented by `AsyncLLM` and by the tests' scripted engine.

These protocols contain no code; they keep the handlers independent of processes, sockets and models.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo_engine.frontend.adapter_names import NamedAdapter
    from octavo_engine.frontend.outputs import OutputKind, RequestOutput
    from octavo_engine.frontend.request_builder import Frontend, ResolvedParams, TokenizedPrompt
    from octavo_engine.settings.config import EngineConfig
    from octavo_engine.settings.records import ReadyInfo
    from octavo_engine.wire.inspection import SequenceInfo
    from octavo_engine.wire.kv_stream import KVChange
    from octavo_engine.wire.records import BlockLife, EngineRequest, EngineStats
    from octavo_engine.wire.sampling import SamplingParams
    from octavo_engine.wire.sleep import MemoryTag


class EngineClient(Protocol):
    on_stats: "Callable[[EngineStats], None] | None"
    on_block_lives: "Callable[[list[BlockLife]], None] | None"
    on_kv: "Callable[[KVChange | None, EngineStats], None] | None"
    on_add: "Callable[[EngineRequest], None] | None"
    on_adapters: "Callable[[dict[str, str]], None] | None"

    @property
    def config(self) -> "EngineConfig": ...

    @property
    def ready_info(self) -> "ReadyInfo": ...

    @property
    def frontend(self) -> "Frontend":
        """Tokenizer, chat template and default parameters of the model; turns messages and parameters into requests."""
        ...

    @property
    def stats(self) -> "EngineStats": ...

    @property
    def is_dead(self) -> bool: ...

    @property
    def dead_error(self) -> Exception | None: ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests that the engine core has not finished."""
        ...

    def core_cpu_s(self) -> float:
        """CPU seconds that the engine core's process has used; 0 after it has ended."""
        ...

    def probe_core(self) -> int:
        """Probe the engine core unless a probe is unanswered; return the number of answers so far."""
        ...

    def generate(
        self,
        prompt: "TokenizedPrompt",
        params: "SamplingParams | ResolvedParams",
        request_id: str,
        *,
        kind: "OutputKind" = "cumulative",
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        arrival_s: float | None = None,
        start_by_s: float | None = None,
        adapter: str = "",
    ) -> "AsyncGenerator[RequestOutput, None]":
        """Run a request and yield its outputs; closing the generator aborts it. `tenant`, `weight`, `arrival_s`,
        `start_by_s`: see `EngineRequest`. `adapter`: a name of `adapters`, or empty.

        Raises InvalidRequest and ModelNotFound before the first output, EngineDead at any time.
        """
        ...

    async def debug_requests(self) -> "list[SequenceInfo]":
        """State of each running and waiting sequence. Raises EngineDead."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; return False if requests use blocks, which prevents it. Raises EngineDead."""
        ...

    async def reset_mm_cache(self) -> None:
        """Drop the processed images that no request needs. Raises EngineDead."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Give memory back and abort running requests. Raises InvalidRequest, EngineDead."""
        ...

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restore memory, all by default. Raises InvalidRequest, EngineDead, and Unavailable if it still sleeps."""
        ...

    @property
    def adapters(self) -> "Mapping[str, NamedAdapter]":
        """The loaded adapters, by name."""
        ...

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter beside running requests; if the call is cancelled, nothing is loaded.

        Raises InvalidRequest, Unavailable, EngineDead.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its running requests finish. Raises ModelNotFound, EngineDead."""
        ...

    @property
    def sleeping_tags(self) -> "frozenset[MemoryTag]":
        """Memory that is given back; empty if the engine is awake."""
        ...
