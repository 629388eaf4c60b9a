"""Replicas without an engine that publish a real KV stream and can misbehave in ways that a test chooses.

A `FakeReplica` runs in the caller's event loop, on a loopback port that it keeps over restarts. `step` changes its
blocks. `spoil` may lose, repeat, reorder or falsify the frames of later steps; `hang` leaves all connections open and
silent; `kill` resets them and closes the port, as the death of a process does.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from aiohttp import web
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.kv_stream import KVChange, roll, run_together
from octavo_engine.wire.records import EngineStats
from octavo_server.kv.frames import MEDIA_TYPE, Frame, FrameReader, Step, write
from octavo_server.kv.publisher import KVPublisher

from octavo_testing.scripted import ready_info

MODEL = "fake"
#: More than any router forwards.
MAX_BODY_BYTES = 64 * 1024 * 1024
#: Turns of the event loop after which a connection that was being accepted is established.
ACCEPTING_TURNS = 5

#: Maps a step, heartbeats included, to the frames that are sent in its place.
Spoiler = Callable[[Step], Sequence[Frame]]


class FakeReplica:
    def __init__(self, *, models: tuple[str, ...] = (MODEL,), heartbeat_s: float = 0.5, card: str = "") -> None:
        self.models = models
        self.card = card  # fingerprint of the model card
        self.heartbeat_s = heartbeat_s
        self.port = 0
        self.paths: list[str] = []  # of all requests
        self.status: dict[str, int] = {}  # path -> status instead of 200
        self.bodies: dict[str, bytes] = {}
        #: Path -> handler; it takes precedence over `status` and `bodies`.
        self.answers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}
        self.spoil: Spoiler | None = None
        self._awake = asyncio.Event()
        self._awake.set()
        self._runner: web.AppRunner | None = None
        self._listening: socket.socket | None = None
        self.begin()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return self.paths.count("/kv/events")

    def begin(self) -> None:
        """Begin a new epoch without blocks, as an engine that has just started."""
        ready = ready_info(EngineConfig())
        self.publisher = KVPublisher(ready, self.models, heartbeat_s=self.heartbeat_s, card=self.card)
        self.digest = 0

    def begin_epoch_with_blocks(self) -> None:
        """Begin a new epoch with the blocks of the old one."""
        kv_set, digest = self.publisher.kv_set, self.digest
        self.begin()
        self.publisher.kv_set = kv_set
        self.step_packed(b"", b"", digest, running=1)
        self.publisher._digest = self.digest

    async def start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/kv/events", self._events)
        app.router.add_route("*", "/{path:.*}", self._others)
        self._runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        self._listening = socket.create_server(("127.0.0.1", self.port))
        await web.SockSite(self._runner, self._listening).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        runner, self._runner = self._runner, None
        assert runner is not None
        assert runner.server is not None
        assert self._listening is not None
        # Stop accepting first: a client that reconnects at once would be accepted, and cleanup would wait for it.
        asyncio.get_running_loop().remove_reader(self._listening)
        for _ in range(ACCEPTING_TURNS):
            await asyncio.sleep(0)
        for connection in runner.server.connections:
            if connection.transport is not None:  # else it has just been closed
                connection.transport.abort()
        await runner.cleanup()

    async def stop(self) -> None:
        self.wake()
        if self._runner is not None:
            await self.kill()

    async def restart(self) -> None:
        """Start again at the same address, in a new epoch."""
        await self.stop()
        self.begin()
        await self.start()

    def hang(self) -> None:
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def step(self, *, stored: Sequence[int] = (), removed: Sequence[int] = (), **stats: Any) -> None:
        """Publish a step that stores and removes blocks, as an engine core does."""
        self.step_packed(run_together(stored), run_together(removed), roll(0, "device", (*stored, *removed)), **stats)

    def step_packed(self, stored: bytes, removed: bytes, rolled: int, **stats: Any) -> None:
        self.digest ^= rolled
        change = KVChange(stored=stored, removed=removed, digest=self.digest) if stored or removed else None
        self.publisher.publish(change, EngineStats(**stats))

    def set_vllm_load(self, running: int, waiting: int) -> None:
        lines = [
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{engine="0",model_name="a b}}"}} {running}.0',
            f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0',
            'vllm:num_requests_waiting_by_reason{engine="0"} 77.0',
        ]
        self.bodies["/metrics"] = "\n".join(lines).encode()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        await self._awake.wait()
        if status := self.status.get(request.path):
            return web.Response(status=status)
        response = web.StreamResponse(headers={"content-type": MEDIA_TYPE})
        await response.prepare(request)
        with suppress(ConnectionError):
            async with aclosing(self.publisher.frames()) as frames:
                await self._send(frames, response)
        return response

    async def _send(self, frames: AsyncGenerator[bytes, None], response: web.StreamResponse) -> None:
        reader = FrameReader()
        async for data in frames:
            await self._awake.wait()
            if self.spoil is None:
                await response.write(data)
            else:
                for frame in reader.feed(data):
                    for sent in self.spoil(frame) if isinstance(frame, Step) else (frame,):
                        await response.write(write(sent))

    async def _others(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        await self._awake.wait()
        if answer := self.answers.get(request.path):
            return await answer(request)
        return web.Response(status=self.status.get(request.path, 200), body=self.bodies.get(request.path, b""))


def vllm_replica(*models: str, running: int = 0, waiting: int = 0) -> FakeReplica:
    """Return a replica with the endpoints of a vLLM server: models and metrics, but no KV stream."""
    fake = FakeReplica()
    fake.status["/kv/events"] = 404
    fake.bodies["/v1/models"] = msgspec.json.encode({"object": "list", "data": [{"id": m} for m in models]})
    fake.set_vllm_load(running, waiting)
    return fake


class Lose:
    """Lose the first step that stores a block."""

    def __init__(self) -> None:
        self._is_over = False

    def __call__(self, frame: Step) -> Sequence[Frame]:
        if not self._is_over and frame.stored:
            self._is_over = True
            return ()
        return (frame,)


class Repeat:
    """Send the first step that stores a block again after every later step."""

    def __init__(self) -> None:
        self._kept: Step | None = None

    def __call__(self, frame: Step) -> Sequence[Frame]:
        if self._kept is None:
            self._kept = frame if frame.stored else None
            return (frame,)
        return (frame, self._kept)


def twice(frame: Step) -> Sequence[Frame]:
    return (frame, frame)


class Reorder:
    """Send the first step that stores a block after the step that follows it."""

    def __init__(self) -> None:
        self._held: Step | None = None
        self._is_over = False

    def __call__(self, frame: Step) -> Sequence[Frame]:
        if self._is_over:
            return (frame,)
        if self._held is None:
            self._held = frame if frame.stored else None
            return () if frame.stored else (frame,)
        self._is_over = True
        return (frame, self._held)


def lie(frame: Step) -> Sequence[Frame]:
    """Send a wrong digest."""
    return (msgspec.structs.replace(frame, digest=frame.digest ^ 1),)
