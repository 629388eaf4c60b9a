"""What the HTTP side needs of an engine: `octavo_engine.async_llm.AsyncLLM` is one, the tests' scripted engine another.

Nothing here runs; it names the seam, so that the handlers depend on no process, socket or model.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from octavo_server.openai.rendering import ChatRenderer

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig, ReadyInfo
    from octavo_engine.outputs import OutputKind, RequestOutput
    from octavo_engine.wire.inspection import SequenceInfo
    from octavo_engine.wire.kv_stream import KVChange
    from octavo_engine.wire.records import BlockLife, EngineRequest, EngineStats
    from octavo_engine.wire.sampling import SamplingParams


class TextCodec(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def piece(self, token_id: int) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def to_json(self) -> str: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def vocab_size(self) -> int: ...


class EngineClient(Protocol):
    on_stats: "Callable[[EngineStats], None] | None"
    on_block_lives: "Callable[[list[BlockLife]], None] | None"
    on_kv: "Callable[[KVChange | None, EngineStats], None] | None"
    on_add: "Callable[[EngineRequest], None] | None"

    @property
    def config(self) -> "EngineConfig": ...

    @property
    def ready_info(self) -> "ReadyInfo": ...

    @property
    def tokenizer(self) -> TextCodec: ...

    @property
    def chat_template(self) -> ChatRenderer | None: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def default_sampling_params(self) -> Mapping[str, Any]: ...

    @property
    def stats(self) -> "EngineStats": ...

    @property
    def is_dead(self) -> bool: ...

    @property
    def dead_error(self) -> Exception | None: ...

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine core still owes an end."""
        ...

    def core_cpu_s(self) -> float:
        """CPU time that the engine core's process has used; 0 when it is gone."""
        ...

    def resolve(self, token_ids: list[int], params: "SamplingParams", *, priority: int = 0) -> "SamplingParams":
        """What `generate` would run, but for the seed. Raises InvalidRequest for what it would refuse."""
        ...

    def generate(
        self,
        prompt: Mapping[str, Any],
        params: "SamplingParams",
        request_id: str,
        *,
        kind: "OutputKind" = "cumulative",
        priority: int = 0,
        turn: float = 0.0,
        start_by_s: float | None = None,
    ) -> "AsyncGenerator[RequestOutput, None]":
        """`turn`, `start_by_s`: see `EngineRequest`. Closing the generator aborts the request.

        Raises InvalidRequest before the first output, EngineDead at any time.
        """
        ...

    async def debug_requests(self) -> "list[SequenceInfo]":
        """Raises EngineDead, as does the next."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """False while blocks are in use."""
        ...
