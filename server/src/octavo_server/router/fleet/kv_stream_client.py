"""`KVStreamClient`: follows one replica's KV stream, and sets the replica's state, while discovery names the replica.

The end of a connection decides the next state. A lost one: no requests are sent until the replica answers again.
A fault in a frame: requests are still sent, but without trust in the index. A silent stream: the same, and only where
no other replica can take them until `/health` answers; if the stream resumes, nothing was lost and the index is exact
again. After each end the client connects again for a new snapshot.

A health check that fails stops new requests only. A replica is `is_unresponsive` when several requests in a row got no
answer at all: its host vanished or its process hangs, and the router gives up the requests that wait there.

Large chunks are fed for one replica at a time, one frame per turn of the event loop, so that a hundred snapshots at
once don't delay requests. The clocks of a replica and of the router are never compared.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from octavo_server.backoff import Backoff
from octavo_server.http.router_secret import SECRET_HEADER, OutgoingSecret
from octavo_server.kv.frames import MEDIA_TYPE, Bye, Frame, FrameError, FrameReader, Hello, Load, Step
from octavo_server.router.fleet.block_mirror import BlockMirror, StreamBroken
from octavo_server.router.fleet.health_check import ConnectionLost, HealthCheck
from octavo_server.router.fleet.polling_client import PollingClient
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import NEW, Replica, State
from octavo_server.supervise import cancel_tasks

logger = logging.getLogger(__name__)

LARGE_BYTES = 4096
NO_STREAM = (400, 404, 405, 501)
HINTS = {401: ": it wants --replica-key or --router-secret", 403: ": it wants --replica-key or --router-secret"}
MAX_SILENCE_S = 5.0  # whatever heartbeat a replica promises


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowSettings:
    """`secret`: what the replicas know the router by. `key`: an API key, for those that want one."""

    secret: OutgoingSecret = field(default_factory=OutgoingSecret)
    key: str = ""
    answer_timeout_s: float = 5.0  # until the head of any answer has come
    max_misses: int = 3  # health checks in a row
    missed_heartbeats: int = 2
    reopen_after_s: float = 5.0  # a silent stream, though /health answers
    look_every_s: float = 1.0  # at the health of a polled or silent replica
    looks_at_health: int = 30  # then at its models, and whether it has a stream by now
    looks_at_metrics: int = 5  # one look in so many
    reads_metrics: bool = True
    least_wait_s: float = 0.1
    most_wait_s: float = 2.0
    stable_s: float = 5.0  # exact for so long, a replica is waited for as if it were new

    def headers(self) -> dict[str, str]:
        secret = self.secret.current
        headers = {SECRET_HEADER: secret} if secret else {}
        return headers | ({"authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContext:
    """What the followers of one fleet share."""

    session: aiohttp.ClientSession
    index: PrefixIndex
    settings: FollowSettings
    changed: Callable[[Replica], None]
    heard: Callable[[Replica], None]
    large: asyncio.Lock = field(default_factory=asyncio.Lock)


class NoStream(Exception):
    """The server knows no /kv/events, or was told to have none."""


class StreamSilent(Exception):
    """The stream sends nothing although the replica answers `/health`."""


class KVStreamClient:
    def __init__(self, replica: Replica, around: ClientContext) -> None:
        self.replica = replica
        self._around = around
        settings = around.settings
        self._server = PollingClient(around.session, replica.url, settings.headers)
        self._health = HealthCheck(
            self._server,
            timeout_s=settings.answer_timeout_s,
            pause_s=settings.look_every_s,
            max_misses=settings.max_misses,
        )
        self._backoff = Backoff(least_s=settings.least_wait_s, most_s=settings.most_wait_s, stable_s=settings.stable_s)
        self._exact_since_s: float | None = None
        self._silence_s = settings.answer_timeout_s

    async def run(self) -> None:
        """Run until cancelled: then the replica is gone."""
        blocks = self._renew()
        try:
            while True:
                await self._try(blocks)
                wait_s = self._backoff.ended(lasted_s=self._exact_s())
                blocks.give_up()
                blocks = self._renew()
                await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self._end(blocks)
            self._become("gone", "discovery doesn't name it any more")
            raise
        except Exception as error:  # our own bug: the supervisor logs it and starts another client
            self._end(blocks)
            self._become("connecting", f"following it failed: {error!r}")
            raise

    def _end(self, blocks: BlockMirror) -> None:
        blocks.give_up()
        self.replica.blocks = None

    def _renew(self) -> BlockMirror:
        self.replica.blocks = blocks = BlockMirror(self._around.index)
        self._exact_since_s = None
        self.replica.is_silent = False
        return blocks

    def _exact_s(self) -> float:
        since_s = self._exact_since_s
        return 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s

    async def _try(self, blocks: BlockMirror) -> None:
        """One connection, from its beginning to its end. While a new replica starts, only the first failure is logged:
        enough to find a mistyped address."""
        replica = self.replica
        try:
            while True:
                try:
                    await self._follow(blocks)
                except NoStream:
                    await self._poll()
        except (StreamBroken, FrameError, StreamSilent) as error:
            replica.num_faults += not isinstance(error, StreamSilent)
            state: State = "blind" if replica.state in ("exact", "blind") else "connecting"
            self._become(state, str(error), is_new=replica.state == "connecting")
        except (ConnectionLost, aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, TimeoutError) and replica.state == "blind" and await self._is_healthy():
                return
            why = _described(error, self._around.settings.answer_timeout_s)
            if replica.why == NEW and type(error) is not ConnectionLost:
                logger.info("replica %s isn't there yet: %s", replica.name, why)
            self._become("connecting", why, is_new=isinstance(error, ConnectionLost))

    async def _follow(self, blocks: BlockMirror) -> None:
        """Raises what ended the connection."""
        reader = FrameReader()
        async with self._server.open("/kv/events", self._around.settings.answer_timeout_s) as response:
            if response.status in NO_STREAM or (response.status == 200 and response.content_type != MEDIA_TYPE):
                raise NoStream
            if response.status != 200:
                raise ConnectionLost(f"/kv/events answered {response.status}{HINTS.get(response.status, '')}")
            while chunk := await self._read(response.content):
                if len(chunk) < LARGE_BYTES:
                    for frame in reader.feed(chunk):
                        self._take(blocks, frame)
                else:
                    await self._take_large(blocks, reader, chunk)
        raise ConnectionLost("the stream ended")

    async def _poll(self) -> None:
        """Poll a server without a stream, until it is time to ask again whether it has one. Raises if it fails."""
        settings, replica = self._around.settings, self.replica
        replica.hello, replica.load = None, Load()
        found = await self._server.models(settings.answer_timeout_s)
        replica.lengths = {name: length for name, length in found.items() if length is not None}
        if found.keys() != replica.models:
            replica.models = frozenset(found)
            self._around.changed(replica)
        for look in range(settings.looks_at_health):
            if settings.reads_metrics and look % settings.looks_at_metrics == 0:
                replica.load = await self._server.load(settings.answer_timeout_s)
            self._become("blind", "it has no KV stream")
            await asyncio.sleep(settings.look_every_s)
            await self._health.run(self._set_silent)

    async def _read(self, content: aiohttp.StreamReader) -> bytes:
        """Empty at the end of the stream."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await content.readany()
        except TimeoutError:  # if bytes are there by now, this process was held up, not the replica
            return content.read_nowait() or await self._wait_out_silence(content)
        except aiohttp.ClientPayloadError:
            raise ConnectionLost("the connection broke") from None

    async def _wait_out_silence(self, content: aiohttp.StreamReader) -> bytes:
        """Read on while `/health` is checked. Raises ConnectionLost or StreamSilent."""
        if self.replica.state in ("exact", "blind"):
            self.replica.is_silent = True
            self._become("blind", f"its KV stream has been silent for {self._silence_s:g} s")
        reading = asyncio.create_task(content.readany())
        checking = asyncio.create_task(self._check_silent_replica())
        try:
            await asyncio.wait({reading, checking}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                checking.result()
            data = reading.result()
        except aiohttp.ClientPayloadError:
            raise ConnectionLost("the connection broke") from None
        finally:
            await cancel_tasks([reading, checking])
        self._set_silent(False)
        return data

    async def _check_silent_replica(self) -> None:
        """Raises ConnectionLost if `/health` fails, StreamSilent if the stream stays silent although it answers."""
        settings, clock = self._around.settings, asyncio.get_running_loop().time
        reopen_s = clock() + settings.reopen_after_s
        self._server.num_unanswered = 0  # the stream has spoken since
        while clock() < reopen_s:
            await self._health.run(self._set_silent)
            await asyncio.sleep(settings.look_every_s)
        raise StreamSilent(f"its KV stream was silent for more than {settings.reopen_after_s:g} s")

    async def _is_healthy(self) -> bool:
        try:
            await self._health.run(self._set_silent)
        except ConnectionLost:
            return False
        return True

    def _set_silent(self, is_silent: bool) -> None:
        if self.replica.is_silent is not is_silent:
            self.replica.is_silent = is_silent
            self._around.changed(self.replica)

    async def _take_large(self, blocks: BlockMirror, reader: FrameReader, chunk: bytes) -> None:
        async with self._around.large:
            for frame in reader.feed(chunk):
                self._take(blocks, frame)
                await asyncio.sleep(0)

    def _take(self, blocks: BlockMirror, frame: Frame) -> None:
        replica = self.replica
        accepted = replica.load.accepts
        if type(frame) is Bye and not frame.again:
            raise ConnectionLost(frame.reason)
        blocks.feed(frame)
        if type(frame) is Step and replica.state == "exact":
            replica.load = frame.load
            if frame.load.accepts is not accepted:
                self._around.changed(replica)
        elif isinstance(frame, Hello):
            self._meet(frame)
        elif blocks.state == "exact":
            self._become_exact(blocks)
        self._around.heard(replica)

    def _meet(self, hello: Hello) -> None:
        replica = self.replica
        replica.hello, replica.models = hello, frozenset(hello.models)
        self._silence_s = min(MAX_SILENCE_S, self._around.settings.missed_heartbeats * max(hello.heartbeat_s, 0.1))
        if replica.admitted_epoch == hello.epoch:
            self._become("blind", "its snapshot is on its way")
        else:
            self._become("loading", "its snapshot is on its way")

    def _become_exact(self, blocks: BlockMirror) -> None:
        assert blocks.hello is not None
        self.replica.load = blocks.load
        self.replica.admitted_epoch = blocks.hello.epoch
        self._exact_since_s = self._exact_since_s or asyncio.get_running_loop().time()
        self._become("exact", "every change so far is known")

    def _become(self, state: State, why: str, *, is_new: bool = False) -> None:
        """`is_new`: log the reason even if the state is unchanged. A server that never had a stream is logged at INFO:
        it has none on purpose."""
        replica = self.replica
        is_unresponsive = state == "connecting" and self._server.num_unanswered >= self._around.settings.max_misses
        if (replica.state, replica.why, replica.is_unresponsive) == (state, why, is_unresponsive):
            return
        if replica.state != state or is_new:
            is_usual = state in ("loading", "exact", "gone") or (state == "blind" and replica.why == NEW)
            level = logging.INFO if is_usual else logging.WARNING
            logger.log(level, "replica %s is %s: %s", replica.name, state, why.removesuffix("."))
        replica.state, replica.why, replica.is_unresponsive = state, why, is_unresponsive
        self._around.changed(replica)


def _described(error: Exception, answer_timeout_s: float) -> str:
    """The reason that logs and `/debug/index` give for a replica that isn't there."""
    if isinstance(error, TimeoutError):
        return f"no answer within {answer_timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        found = error.os_error
        if isinstance(found, socket.gaierror) or found.errno is None:
            return f"no connection: {found.strerror or found}"
        return f"no connection: {os.strerror(found.errno)}"
    return str(error) or type(error).__name__
