"""`KVStreamClient`: keeps one replica's state true, for as long as discovery names it, by following its KV stream.

What ends a connection decides what becomes of the replica. A connection that is lost: it isn't sent to until it answers
again. A fault in what it told: it may be sent to, but isn't believed. Silence, though the connection is there: it isn't
believed, and not sent to either unless /health answers; if it speaks again, nothing was lost and it is believed again.
In each case the follower comes back for a new snapshot.

Large chunks are taken in one at a time for all replicas, a frame in each turn of the event loop: a hundred snapshots at
once don't hold up requests. No clock of a replica is ever compared with the router's.
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
from octavo_server.router.fleet.polling_client import PollingClient
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import NEW, Replica, State

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
    answer_timeout_s: float = 2.0  # until the head of an answer is there
    health_timeout_s: float = 1.0  # the same for /health of a replica that fell silent
    missed_heartbeats: int = 2
    reopen_after_s: float = 5.0  # a silent stream, though /health answers
    look_every_s: float = 1.0  # at the health of a replica without a stream
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


class Lost(Exception):
    """The connection is gone; the message says how."""


class KVStreamClient:
    def __init__(self, replica: Replica, around: ClientContext) -> None:
        self.replica = replica
        self._around = around
        settings = around.settings
        self._server = PollingClient(around.session, replica.url, settings.headers)
        self._backoff = Backoff(least_s=settings.least_wait_s, most_s=settings.most_wait_s, stable_s=settings.stable_s)
        self._exact_since_s: float | None = None
        self._silence_s = settings.answer_timeout_s

    async def run(self) -> None:
        """Until it is cancelled: then the replica is gone."""
        blocks = self._renew()
        try:
            while True:
                await self._try(blocks)
                wait_s = self._backoff.ended(lasted_s=self._exact_s())
                blocks.give_up()
                blocks = self._renew()
                await asyncio.sleep(wait_s)
        finally:
            blocks.give_up()
            self.replica.blocks = None
            self._become("gone", "discovery doesn't name it any more")

    def _renew(self) -> BlockMirror:
        self.replica.blocks = blocks = BlockMirror(self._around.index)
        self._exact_since_s = None
        self.replica.is_silent = False
        return blocks

    def _exact_s(self) -> float:
        since_s = self._exact_since_s
        return 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s

    async def _try(self, blocks: BlockMirror) -> None:
        """One connection, from its beginning to its end. Of a replica that may still be starting only the first try is
        told, as nobody would find a mistyped address otherwise."""
        replica = self.replica
        try:
            while True:
                try:
                    await self._follow(blocks)
                except NoStream:
                    await self._watch()
        except (StreamBroken, FrameError) as error:
            replica.num_faults += 1
            state: State = "blind" if replica.state in ("exact", "blind") else "connecting"
            self._become(state, str(error), is_new=replica.state == "connecting")
        except (Lost, aiohttp.ClientError, TimeoutError, OSError) as error:
            why = _told(error, self._around.settings.answer_timeout_s)
            if replica.why == NEW and type(error) is not Lost:
                logger.info("replica %s isn't there yet: %s", replica.name, why)
            self._become("connecting", why, is_new=isinstance(error, Lost))

    async def _follow(self, blocks: BlockMirror) -> None:
        """Raises what ended the connection."""
        reader = FrameReader()
        async with self._server.open("/kv/events", self._around.settings.answer_timeout_s) as response:
            if response.status in NO_STREAM or (response.status == 200 and response.content_type != MEDIA_TYPE):
                raise NoStream
            if response.status != 200:
                raise Lost(f"/kv/events answered {response.status}{HINTS.get(response.status, '')}")
            while chunk := await self._read(response.content):
                if len(chunk) < LARGE_BYTES:
                    for frame in reader.feed(chunk):
                        self._take(blocks, frame)
                else:
                    await self._take_large(blocks, reader, chunk)
        raise Lost("the stream ended")

    async def _watch(self) -> None:
        """A server without a stream, until it is time to look again whether it has one. Raises if it doesn't answer."""
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
            await self._check_health()

    async def _read(self, content: aiohttp.StreamReader) -> bytes:
        """Empty at the end. Raises Lost for a silence that /health doesn't explain."""
        silent_s = 0.0
        while True:
            try:
                async with asyncio.timeout(self._silence_s):
                    return await content.readany()
            except TimeoutError:
                if chunk := content.read_nowait():  # this process was held up, not the replica
                    return chunk
                silent_s += self._silence_s
                if silent_s >= self._around.settings.reopen_after_s:
                    raise Lost(f"nothing was heard for {silent_s:g} s") from None
                if self.replica.state in ("exact", "blind"):
                    await self._explain(f"nothing was heard for {silent_s:g} s")
            except aiohttp.ClientPayloadError:
                raise Lost("the connection broke") from None

    async def _explain(self, silence: str) -> None:
        """Raises Lost if the replica doesn't say that it is well."""
        self.replica.is_silent = True
        self._become("blind", silence)
        await self._check_health()
        self.replica.is_silent = False
        self._around.changed(self.replica)

    async def _check_health(self) -> None:
        try:
            async with self._server.open("/health", self._around.settings.health_timeout_s) as answer:
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            raise Lost("/health didn't answer") from None
        if status >= 500:
            raise Lost(f"/health answered {status}")

    async def _take_large(self, blocks: BlockMirror, reader: FrameReader, chunk: bytes) -> None:
        async with self._around.large:
            for frame in reader.feed(chunk):
                self._take(blocks, frame)
                await asyncio.sleep(0)

    def _take(self, blocks: BlockMirror, frame: Frame) -> None:
        replica = self.replica
        accepted = replica.load.accepts
        if type(frame) is Bye and not frame.again:
            raise Lost(frame.reason)
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
        """`is_new`: the reason is to be told even where the state is as before. A new one without a stream has none on
        purpose."""
        replica = self.replica
        if (replica.state, replica.why) == (state, why):
            return
        if replica.state != state or is_new:
            is_usual = state in ("loading", "exact", "gone") or (state == "blind" and replica.why == NEW)
            level = logging.INFO if is_usual else logging.WARNING
            logger.log(level, "replica %s is %s: %s", replica.name, state, why.removesuffix("."))
        replica.state, replica.why = state, why
        self._around.changed(replica)


def _told(error: Exception, answer_timeout_s: float) -> str:
    """In words for whoever looks why a replica isn't there."""
    if isinstance(error, TimeoutError):
        return f"no answer within {answer_timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        found = error.os_error
        if isinstance(found, socket.gaierror) or found.errno is None:
            return f"no connection: {found.strerror or found}"
        return f"no connection: {os.strerror(found.errno)}"
    return str(error) or type(error).__name__
