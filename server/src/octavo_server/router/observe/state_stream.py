"""`GET /state/events`: a stream of the router's state for operator and autoscaler, in place of scraping.

The stream begins with the whole state. Changes follow, usually at most one every `PERIOD_S`, urgent ones at most one
every `LEAST_DISTANCE_S`, and a heartbeat after each second without a change. A change is the difference from the state
last sent to that reader, built when the reader can receive it: a slow reader gets fewer, larger changes, and no backlog
grows. The server closes the stream of a reader that stops reading.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo_server.http.responses import run_until_disconnect
from octavo_server.openai import sse
from octavo_server.router.observe.state import ReplicaState, RouterState

VERSION = 1
PERIOD_S = 0.2
LEAST_DISTANCE_S = 0.025  # the operator disconnects a router that sends more than 50 events a second
HEARTBEAT_S = 1.0

T = TypeVar("T")
Source = Callable[[], Awaitable[RouterState]]


class WholeState(msgspec.Struct, tag="state", kw_only=True):
    """The first event of a stream. `router` is different after each start of the router."""

    version: int
    router: str
    state: RouterState


class Change(msgspec.Struct, tag="change", kw_only=True, omit_defaults=True):
    """`replicas`: changed ones with all fields. `gone`: names of removed ones. Other fields appear if they changed."""

    replicas: tuple[ReplicaState, ...] = ()
    gone: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    queue: dict[str, int] | None = None
    held: dict[str, int] | None = None
    requests: dict[str, int] | None = None
    workers: int | None = None
    accepts: bool | None = None


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    pass


class StreamEnd(msgspec.Struct, tag="bye"):
    """The last event of a stream. `reason`: why the router ends it."""

    reason: str


class StateFeed:
    def __init__(
        self,
        source: Source,
        *,
        period_s: float = PERIOD_S,
        heartbeat_s: float = HEARTBEAT_S,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.router = secrets.token_hex(8)
        self._source = source
        self._period_s = period_s
        self._heartbeat_s = heartbeat_s
        self._pause = pause
        self._wakeups: set[asyncio.Event] = set()  # one for each reader
        self._end_reason: str | None = None

    @property
    def num_readers(self) -> int:
        return len(self._wakeups)

    def notify(self) -> None:
        """Send the next change as soon as `LEAST_DISTANCE_S` permits, not at the end of the period."""
        for wakeup in self._wakeups:
            wakeup.set()

    def close(self, reason: str) -> None:
        self._end_reason = reason
        self.notify()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        wakeup = asyncio.Event()
        self._wakeups.add(wakeup)
        try:
            sent = await self._source()
            yield sse.frame(WholeState(version=VERSION, router=self.router, state=sent))
            clock = asyncio.get_running_loop().time
            silent_since_s = clock()
            while self._end_reason is None:
                await _wait(wakeup, self._period_s)
                now = await self._source()
                if now != sent:
                    change, sent = difference(sent, now), now
                    yield sse.frame(change)
                elif clock() - silent_since_s >= self._heartbeat_s:
                    yield sse.frame(Heartbeat())
                else:
                    continue
                silent_since_s = clock()
                await self._pause(LEAST_DISTANCE_S)
            if (now := await self._source()) != sent:
                yield sse.frame(difference(sent, now))
            yield sse.frame(StreamEnd(self._end_reason))
        finally:
            self._wakeups.discard(wakeup)


def difference(before: RouterState, now: RouterState) -> Change:
    old = {replica.name: replica for replica in before.replicas}
    names = {replica.name for replica in now.replicas}
    return Change(
        replicas=tuple(replica for replica in now.replicas if old.get(replica.name) != replica),
        gone=tuple(name for name in old if name not in names),
        models=_if_new(before.models, now.models),
        queue=_if_new(before.queue, now.queue),
        held=_if_new(before.held, now.held),
        requests=_if_new(before.requests, now.requests),
        workers=_if_new(before.workers, now.workers),
        accepts=_if_new(before.accepts, now.accepts),
    )


class StateStream(Response):
    """Streams the feed until the client disconnects or the feed is closed."""

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._write(send))
        if await run_until_disconnect(work, receive):
            work.result()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _wait(wakeup: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await wakeup.wait()
    wakeup.clear()


def _if_new(before: T, now: T) -> T | None:
    return None if now == before else now
