"""`AsyncLLM`: streams many concurrent requests from an engine core in another process. This module imports no torch.

One task reads the core's outputs and turns them into text (`assembly`); each caller waits for the outputs of its own
request only. A caller that closes or cancels its stream aborts its request at once. When the core dies, every open
stream and every later call raises EngineDead.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from octavo_engine.frontend.adapter_names import AdapterNames, NamedAdapter
from octavo_engine.frontend.output_stream import OutputStream
from octavo_engine.frontend.outputs import OutputKind, RequestOutput, output_kind
from octavo_engine.frontend.request_builder import Frontend, Prompt, ResolvedParams, TokenizedPrompt
from octavo_engine.log_format import LogFormat
from octavo_engine.process.client import DEFAULT_LOADER, CoreProcess
from octavo_engine.process.messages import Abort, Add
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.errors import EngineDead, InvalidRequest, Unavailable
from octavo_engine.wire.inspection import SequenceInfo
from octavo_engine.wire.kv_stream import KVChange
from octavo_engine.wire.records import BlockLife, EngineRequest, EngineStats, SeqOutput
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.sleep import ASLEEP, WAKE_RETRY_S, MemoryTag, check_enabled, tags_of_level, tags_to_wake

LONG_PROMPT_CHARS = 2000  # longer prompts are tokenised in a thread, so that other streams are not delayed
#: Loading a large model from a slow disk takes minutes. A dead core ends the call at once.
CALL_TIMEOUT_S = 1800.0


class SleepSwitch:
    """Puts an engine core in another process to sleep. `tags`: memory that the core has given back, or is about to.

    Calls are served one after another.
    """

    def __init__(self, core: CoreProcess) -> None:
        self.tags: set[MemoryTag] = set()
        self._core = core
        self._lock = asyncio.Lock()

    @property
    def is_switching(self) -> bool:
        return self._lock.locked()

    async def sleep(self, tags: Iterable[MemoryTag]) -> None:
        async with self._lock:
            self.tags |= set(tags)  # no request is sent from now on
            await self._core.call("sleep", [*tags], timeout_s=CALL_TIMEOUT_S)

    async def wake_up(self, tags: Iterable[MemoryTag]) -> None:
        """Wake the tags one by one. Raises Unavailable if the memory of a tag cannot be restored: it still sleeps."""
        async with self._lock:
            for tag in tags:
                await self._core.call("wake_up", [tag], timeout_s=CALL_TIMEOUT_S)
                self.tags.discard(tag)


class AsyncLLM:
    """Streams the requests of one engine core. `start` and `shutdown` must be called in the same event loop.

    `frontend`: the model's tokenizer, chat template and defaults; its `resolve` checks parameters for many prompts.
    """

    def __init__(self, config: EngineConfig, frontend: Frontend, core: CoreProcess, ready: ReadyInfo) -> None:
        self.config = config
        self.ready_info = ready
        self.stats = EngineStats(free_blocks=ready.num_blocks, total_blocks=ready.num_blocks)
        self.on_stats: Callable[[EngineStats], None] | None = None  # called after each step
        self.on_kv: Callable[[KVChange | None, EngineStats], None] | None = None  # called after and during a step
        self.on_add: Callable[[EngineRequest], None] | None = None  # called when a request is sent to the core
        self.on_adapters: Callable[[dict[str, str]], None] | None = None  # called with all hashes, by name
        self.on_block_lives: Callable[[list[BlockLife]], None] | None = None  # called only with --kv-cache-metrics
        self.dead_error: EngineDead | None = None
        self.frontend = frontend
        self._core = core
        self._sleep_switch = SleepSwitch(core)
        self._adapter_names = AdapterNames(core, config, ready)
        self._streams: dict[str, OutputStream] = {}  # by the request's id in the core
        self._serial = itertools.count()
        self._num_answers = 0
        self._reader = asyncio.create_task(self._read_outputs())
        self._reader.add_done_callback(self._on_reader_end)

    @classmethod
    async def start(
        cls, config: EngineConfig, *, loader: str = DEFAULT_LOADER, log_format: LogFormat = "text"
    ) -> "AsyncLLM":
        """Start an engine core process and load the tokenizer; return when both are ready. Raises StartupError."""
        core = await CoreProcess.launch(config, loader, log_format)
        becoming_ready = asyncio.create_task(core.ready())
        try:
            frontend = await asyncio.to_thread(Frontend.load, config)
            ready = await becoming_ready
        except BaseException:
            becoming_ready.cancel()
            await asyncio.gather(becoming_ready, return_exceptions=True)
            await core.stop()
            raise
        frontend.set_ready(ready)
        return cls(frontend.config, frontend, core, ready)

    async def generate(
        self,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | ResolvedParams,
        request_id: str,
        *,
        kind: OutputKind | None = None,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        arrival_s: float | None = None,
        start_by_s: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send a request to the engine core and yield its outputs until the last; the module `outputs` explains `kind`.

        Parameters from `resolve_pooling` give one output, with the prompt's vector as its `embedding`.

        `kind`: default `params.output_kind`. `tenant`, `weight`, `arrival_s` (default: now), `start_by_s`: see
        `EngineRequest`. `adapter`: a name in `adapters`, or "". Before the first output, InvalidRequest and
        ModelNotFound may be raised, and Unavailable while the engine sleeps; EngineDead may be raised at any time. If
        only a sequence fails, nothing is raised: its finish_reason is "error".
        """
        tokenized = await self._tokenize(prompt, add_special_tokens)
        tokenized.cache_salt = cache_salt or tokenized.cache_salt
        resolved = params if isinstance(params, ResolvedParams) else await self._resolve(params, priority)
        # No await from here on: the core gets the request before any `unload_adapter`.
        tokenized.adapter = self._adapter_names.hash_of(adapter)
        request = self.frontend.build(
            tokenized,
            resolved,
            request_id=self._new_core_id(request_id),
            priority=priority,
            tenant=tenant,
            weight=weight,
            arrival_s=arrival_s,
            start_by_s=start_by_s,
        )
        shown = kind or output_kind(resolved.params)
        stream = self._add(tokenized, request, request_id)
        try:
            while True:
                await stream.wait_for_output()
                output = stream.assembly.take_output(shown)
                if output is not None:
                    yield output
                    if output.finished:
                        return
                self._check_alive()
        finally:
            self._forget(stream)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return (await self._tokenize(text, add_special_tokens)).token_ids

    async def abort(self, request_id: str) -> None:
        """End the streams of all requests with this id with finish_reason "abort". An unknown id is ignored."""
        for core_id, stream in self._streams.items():
            if stream.assembly.request_id == request_id:
                self._core.send(Abort(core_id))

    async def debug_requests(self) -> list[SequenceInfo]:
        """Return the running and waiting sequences, with the callers' request ids. Raises EngineDead."""
        self._check_alive()
        sequences = await self._core.call("debug_requests")
        assert isinstance(sequences, list)
        named = {core_id: stream.assembly.request_id for core_id, stream in self._streams.items()}
        return [replace(info, request_id=named.get(info.request_id, info.request_id)) for info in sequences]

    async def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks; return False and do nothing while a request holds blocks. Raises EngineDead."""
        self._check_alive()
        return bool(await self._core.call("reset_prefix_cache"))

    async def reset_mm_cache(self) -> None:
        """Drop the processed images that no request needs. Raises EngineDead."""
        self._check_alive()
        await self._core.call("reset_mm_cache")

    async def sleep(self, level: int = 1) -> None:
        """Give back the KV cache (level 1), and the weights, too (level 2); running requests end with "abort".

        Until `wake_up`, `generate` raises Unavailable. Raises InvalidRequest for an unknown level or without
        `enable_sleep_mode`, EngineDead.
        """
        check_enabled(self.config)
        self._check_alive()
        await self._sleep_switch.sleep(tags_of_level(level))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restore the memory that these tags name (all by default). Raises Unavailable for memory that still sleeps.

        Raises InvalidRequest for an unknown tag or without `enable_sleep_mode`, EngineDead.
        """
        check_enabled(self.config)
        self._check_alive()
        await self._sleep_switch.wake_up(tags_to_wake(tags))

    @property
    def adapters(self) -> Mapping[str, NamedAdapter]:
        """The loaded adapters, by name."""
        return self._adapter_names.by_name

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter from a folder, beside running requests. `in_place`: it may replace the adapter of this name.

        Raises InvalidRequest for an adapter that can't be loaded, Unavailable while the engine sleeps, EngineDead.
        """
        self._check_alive()
        await self._adapter_names.load(name, path, in_place=in_place, on_change=self.on_adapters)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter: its running requests finish first. Raises ModelNotFound, EngineDead."""
        self._check_alive()
        await self._adapter_names.unload(name, on_change=self.on_adapters)

    @property
    def sleeping_tags(self) -> frozenset[MemoryTag]:
        """Memory that is given back; empty if the engine is awake."""
        return frozenset(self._sleep_switch.tags)

    async def shutdown(self) -> None:
        self._end_all(EngineDead("the engine has been shut down."))
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._core.stop()

    @property
    def is_dead(self) -> bool:
        return self.dead_error is not None

    @property
    def num_unfinished(self) -> int:
        """Number of requests whose last output has not arrived from the engine core yet."""
        return sum(not stream.assembly.finished for stream in self._streams.values())

    def core_cpu_s(self) -> float:
        """CPU seconds that the engine core's process has used; 0 after it has ended."""
        return self._core.cpu_s()

    def probe_core(self) -> int:
        """Send the core a probe, unless one is unanswered; return how many it has answered.

        While the core frees or restores memory, which takes minutes and has its own timeout, each call counts as one.
        """
        self._num_answers += self._core.probe() or self._sleep_switch.is_switching
        return self._num_answers

    async def _resolve(self, params: SamplingParams, priority: int) -> ResolvedParams:
        """Resolve parameters that take long in a thread, so that no stream is delayed."""
        if params.structured_outputs is None and not params.bad_words:
            return self.frontend.resolve(params, priority=priority)
        return await asyncio.to_thread(self.frontend.resolve, params, priority=priority)

    async def _tokenize(self, prompt: Prompt | TokenizedPrompt, add_special_tokens: bool) -> TokenizedPrompt:
        self._check_alive()
        if isinstance(prompt, TokenizedPrompt):
            return replace(prompt)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        has_images = isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))
        if has_images or (isinstance(text, str) and len(text) > LONG_PROMPT_CHARS):
            return await asyncio.to_thread(self.frontend.tokenize, prompt, add_special_tokens=add_special_tokens)
        return self.frontend.tokenize(prompt, add_special_tokens=add_special_tokens)

    def _new_core_id(self, request_id: str) -> str:
        """Make a unique id for the core: late outputs never reach a later request with the same `request_id`.

        Callers' ids may repeat: proxies and agents send one id with parallel requests and retries.
        """
        self._check_alive()
        if self._sleep_switch.tags:
            raise Unavailable(ASLEEP, retry_after_s=WAKE_RETRY_S)
        return f"{request_id}.{next(self._serial)}"

    def _add(self, prompt: TokenizedPrompt, request: EngineRequest, request_id: str) -> OutputStream:
        stream = OutputStream(self.frontend.assemble(request, prompt, request_id=request_id))
        try:
            self._core.send(Add(_without_schema(request)))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"an argument of the request can't be sent to the engine core: {error}.") from error
        self._streams[request.request_id] = stream
        if self.on_add is not None:
            self.on_add(request)
        return stream

    def _forget(self, stream: OutputStream) -> None:
        del self._streams[stream.core_id]
        if not stream.assembly.finished and not self.is_dead:
            with suppress(EngineDead):
                self._core.send(Abort(stream.core_id))

    async def _read_outputs(self) -> None:
        async for core in self._core.outputs():
            if core.stats is not None:
                if not core.is_interim:
                    self._update_stats(core.stats)
                if core.block_lives and self.on_block_lives is not None:
                    self.on_block_lives(core.block_lives)
                if self.on_kv is not None:
                    self.on_kv(core.kv, core.stats)
            now = time.monotonic()
            for out in core.outputs:
                self._dispatch(out, now)

    def _update_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        if self.on_stats is not None:
            self.on_stats(stats)

    def _dispatch(self, out: SeqOutput, now: float) -> None:
        stream = self._streams.get(out.request_id)
        if stream is None:
            return
        if stream.assembly.push(out, now):
            self._core.send(Abort(out.request_id, out.index))
        stream.notify()

    def _on_reader_end(self, reader: "asyncio.Task[None]") -> None:
        if reader.cancelled():
            return
        error = reader.exception()
        self._end_all(
            error if isinstance(error, EngineDead) else EngineDead(f"reading the engine's outputs failed: {error!r}")
        )

    def _end_all(self, error: EngineDead) -> None:
        self.dead_error = self.dead_error or error
        for stream in self._streams.values():
            stream.notify()

    def _check_alive(self) -> None:
        if self.dead_error is not None:
            raise EngineDead(str(self.dead_error))


def _without_schema(request: EngineRequest) -> EngineRequest:
    """Return the request as the core needs it: with `grammar` only. A schema may hold integers beyond 64 bits."""
    if request.params.structured_outputs is None:
        return request
    return replace(request, params=replace(request.params, structured_outputs=None))
