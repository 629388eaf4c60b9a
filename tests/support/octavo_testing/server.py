"""An engine client that plays a script inside the test's event loop, and a real API server around it.

Prompts, limits, stop strings and text assembly are the engine's own code; only scheduling and computing are simulated.
A test sets the attributes of `ScriptedClient` before it sends a request, and may hold the engine at a position.
"""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from octavo_engine.frontend.adapter_names import NamedAdapter
from octavo_engine.frontend.outputs import OutputKind, RequestOutput
from octavo_engine.frontend.request_builder import Frontend, ResolvedParams, TokenizedPrompt
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.errors import AdapterNameTaken, EngineDead, ModelNotFound
from octavo_engine.wire.inspection import SequenceInfo
from octavo_engine.wire.kv_stream import KVChange
from octavo_engine.wire.records import (
    BlockLife,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    SeqOutput,
    Timing,
    TokenLogprobs,
)
from octavo_engine.wire.sampling import SamplingParams
from octavo_engine.wire.sleep import MemoryTag, tags_of_level, tags_to_wake
from octavo_server.api.app import ApiServer, build_app
from octavo_server.config import ServerConfig
from openai import AsyncOpenAI

from octavo_testing.scripted import EOS, VOCAB_SIZE, ready_info, scripted_hash, text_ids

MODEL = "scripted"


class ScriptedClient:
    """`replies[i % len]` is the output of sequence i, as text or token ids. Events apply to every output of a request.

    `yield_at` holds the numbers of tokens after which an output is yielded. None: after each token.
    """

    def __init__(self, folder: Path, **config: Any) -> None:
        self.config = EngineConfig(model=str(folder), load_format="dummy", **{"max_model_len": 512, **config})
        self.ready_info: ReadyInfo = ready_info(self.config)
        self.stats = EngineStats(free_blocks=256, total_blocks=256)
        self.on_block_lives: Callable[[list[BlockLife]], None] | None = None
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_kv: Callable[[KVChange | None, EngineStats], None] | None = None
        self.on_adapters: Callable[[dict[str, str]], None] | None = None
        self.on_add: Callable[[EngineRequest], None] | None = None
        self.frontend = Frontend.load(self.config)
        self.reset()

    def reset(self) -> None:
        self.replies: list[str | list[int]] = ["Hello, world!"]
        self.yield_at: frozenset[int] | None = None
        self.num_cached_tokens = 0
        self.hold_at: int | None = None
        self.fail_at: int | None = None
        self.failure = ErrorInfo("the step failed: scripted")
        self.die_at: int | None = None
        self.is_dead = False
        self.resumed = asyncio.Event()
        self.held = asyncio.Event()
        self.requests: list[EngineRequest] = []
        self.num_answers = 0
        self.adapter_error: Exception | None = None
        self.adapters_readable = asyncio.Event()
        self.adapters_readable.set()
        self.loading: list[str] = []  # names of adapters
        self.adapters = {
            module.name: NamedAdapter(scripted_hash(module.path), module.path, module.base_model_name)
            for module in self.config.lora_modules
        }
        self.running: set[str] = set()
        self.sequences: list[SequenceInfo] = []
        self.sleeping_tags: frozenset[MemoryTag] = frozenset()
        self.wake_error: Exception | None = None
        self.aborted: asyncio.Queue[str] = asyncio.Queue()

    async def generate(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams | ResolvedParams,
        request_id: str,
        *,
        kind: OutputKind = "cumulative",
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        arrival_s: float | None = None,
        start_by_s: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        if adapter and adapter not in self.adapters:
            raise ModelNotFound(adapter)
        tokenized = replace(prompt, adapter=self.adapters[adapter].hash if adapter else "")
        resolved = params if isinstance(params, ResolvedParams) else self.frontend.resolve(params, priority=priority)
        request = self.frontend.build(
            *(tokenized, resolved),
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            weight=weight,
            arrival_s=arrival_s,
            start_by_s=start_by_s,
        )
        assembly = self.frontend.assemble(request, tokenized, request_id=request_id)
        self.requests.append(request)
        self.running.add(request_id)
        try:
            for position in itertools.count():
                await self._play_events(position)
                for index in range(request.params.n):
                    assembly.push(self._step(request, index, position), time.monotonic())
                if self.yield_at is not None and position + 1 not in self.yield_at and not assembly.finished:
                    continue
                output = assembly.take_output(kind)
                if output is not None:
                    yield output
                if assembly.finished:
                    return
        finally:
            self.running.discard(request_id)
            if not assembly.finished:
                self.aborted.put_nowait(request_id)

    def prompt_text(self, index: int = -1) -> str:
        """The prompt of a request, with its special tokens."""
        return self.frontend.tokenizer.decode(self.requests[index].prompt_token_ids, skip_special_tokens=False)

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    @property
    def dead_error(self) -> EngineDead | None:
        return EngineDead("the engine core was killed.") if self.is_dead else None

    def core_cpu_s(self) -> float:
        return 0.0

    def probe_core(self) -> int:
        self.num_answers += 1
        return self.num_answers

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        self.loading.append(name)
        try:
            await self.adapters_readable.wait()
        finally:
            self.loading.remove(name)
        if self.adapter_error is not None:
            raise self.adapter_error
        if name in self.adapters and not in_place:
            raise AdapterNameTaken(name)
        self.adapters[name] = NamedAdapter(scripted_hash(path), path)
        self._publish_adapters()

    async def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise ModelNotFound(name)
        del self.adapters[name]
        self._publish_adapters()

    def _publish_adapters(self) -> None:
        if self.on_adapters is not None:
            self.on_adapters({name: adapter.hash for name, adapter in self.adapters.items()})

    async def debug_requests(self) -> list[SequenceInfo]:
        return self.sequences

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    async def reset_mm_cache(self) -> None:
        """Do nothing: a scripted model sees nothing."""

    async def sleep(self, level: int = 1) -> None:
        self.sleeping_tags |= set(tags_of_level(level))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        if self.wake_error is not None:
            raise self.wake_error
        self.sleeping_tags -= set(tags_to_wake(tags))

    def reply_to(self, request: EngineRequest, index: int) -> str | list[int]:
        """Return the output of a sequence, as text or token ids."""
        return self.replies[index % len(self.replies)]

    async def _play_events(self, position: int) -> None:
        await asyncio.sleep(0)
        if position == self.hold_at:
            self.held.set()
            await self.resumed.wait()
        self.is_dead = self.is_dead or position == self.die_at
        if self.is_dead:
            raise EngineDead("the engine core was killed.")

    def _step(self, request: EngineRequest, index: int, position: int) -> SeqOutput:
        out = SeqOutput(request_id=request.request_id, index=index, num_cached_tokens=self.num_cached_tokens)
        if position == self.fail_at:
            out.finish_reason, out.error = "error", self.failure
            return out
        params = request.params
        reply = self.reply_to(request, index)
        script = [*(text_ids(reply) if isinstance(reply, str) else reply), EOS]
        token = script[min(position, len(script) - 1)]
        out.token_ids = [token]
        if params.logprobs is not None:
            out.logprobs = [scripted_logprobs(token, params.logprobs)]
        if position == 0 and params.prompt_logprobs is not None:
            later = request.prompt_token_ids[1:]
            out.prompt_logprobs = [None, *(scripted_logprobs(t, params.prompt_logprobs) for t in later)]
        if token == EOS and not params.ignore_eos:
            out.finish_reason = "stop"
        elif position + 1 == params.max_tokens:
            out.finish_reason = "length"
        out.timing = Timing(queue_s=0.1, prefill_s=0.2, decode_s=0.3, inference_s=0.5) if out.finish_reason else None
        return out


def scripted_logprobs(token: int, top: int) -> TokenLogprobs:
    """Return logprobs in which the chosen token is the second likeliest; the last of several others is impossible."""
    others = [(token + k) % VOCAB_SIZE for k in range(1, top + 1)]
    values = [-0.25 * k for k in range(1, top + 1)]
    if top > 1:
        values[-1] = float("-inf")
    return TokenLogprobs([token, *others], [-0.3, *values], rank=2)


class Served:
    """A running server with its address, its engine and clients."""

    def __init__(self, url: str, engine: ScriptedClient, server: ApiServer, http: httpx.AsyncClient) -> None:
        self.url = url
        self.engine = engine
        self.server = server
        self.http = http
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)

    async def metrics(self) -> dict[str, float]:
        return parse_metrics((await self.http.get("/metrics")).text)

    async def stop(self) -> None:
        self.server.stop()


@asynccontextmanager
async def serving(engine: Any, tracer: Any = None, **config: Any) -> AsyncIterator[Served]:
    sock = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio turns off Nagle's algorithm only if `proto` is TCP
    sock.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    settings = ServerConfig(**{"served_model_names": (MODEL,), "drain_timeout": 5.0, **config})
    server = ApiServer(build_app(engine, settings, tracer), settings)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=240) as http:
            yield Served(url, engine, server, http)
    finally:
        server.should_exit = True
        await running


def parse_metrics(text: str) -> dict[str, float]:
    """Return the value of each sample by `name{labels}`, without the labels that every sample has."""
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {_short(name): float(value) for name, value in samples}


def _short(name: str) -> str:
    family, _, labels = name.partition("{")
    kept = [x for x in labels.rstrip("}").split(",") if x and not x.startswith(("model_name=", "engine="))]
    return f"{family}{{{','.join(kept)}}}" if kept else family


def events(body: str) -> list[str]:
    """Return the data of each server-sent event."""
    frames = body.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]


__all__ = ["MODEL", "ScriptedClient", "Served", "events", "parse_metrics", "serving"]


def held_in_threads(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the memory of bodies at the end of each call in a thread."""
    context, held = served.server._context, list[int]()
    run = context.threads.run

    async def run_watched(*arguments: Any, **options: Any) -> Any:
        result = await run(*arguments, **options)
        held.append(context.body_budget.num_bytes)
        return result

    monkeypatch.setattr(context.threads, "run", run_watched)
    return held
