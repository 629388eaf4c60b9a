"""`KVStreamClient` follows one replica's KV stream and sets the replica's state while discovery lists the replica.

The way a connection ends decides the replica's next state. After a lost connection the replica gets no requests until
it answers again. After an invalid frame it still gets requests, but its cache counts as unknown. The same holds for a
silent stream; until `/health` answers, the replica then gets requests only if there is no other. When a silent stream
resumes, no frame was lost and the index is exact again. After each end the client connects again for a new snapshot.

A failed health check only stops new requests. A replica is `is_unresponsive` when several requests in a row got no
response at all: its host vanished or its process hangs. The router then fails the requests that wait for its response.

Large chunks of the streams are applied for one replica at a time, one frame per turn of the event loop, so that a
hundred simultaneous snapshots don't delay requests. The clocks of a replica and of the router are never compared.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from octavo_server.backoff import Backoff
from octavo_server.http.router_secret import SECRET_HEADER, OutgoingSecret
from octavo_server.kv.frames import MEDIA_TYPE, Bye, Frame, FrameError, FrameReader, Hello, Part, ReplicaLoad, Step
from octavo_server.router.fleet.block_mirror import BlockMirror, StreamBroken
from octavo_server.router.fleet.endpoint import State
from octavo_server.router.fleet.polling_client import PollingClient
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.fleet.replica_status import ConnectionLost, HealthCheck, ReplicaStatus, describe_failure
from octavo_server.supervise import cancel_tasks

LARGE_BYTES = 4096
NO_STREAM = (400, 404, 405, 501)
HINTS = {401: ": it requires --replica-key or --router-secret", 403: ": it requires --replica-key or --router-secret"}
#: Longest time without a frame before a stream counts as silent, even if the replica announces a slower heartbeat.
MAX_SILENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowSettings:
    """`secret`: the router secret, by which replicas trust the router. `key`: API key for replicas that require one."""

    secret: OutgoingSecret = field(default_factory=OutgoingSecret)
    key: str = ""
    answer_timeout_s: float = 5.0  # limit for the arrival of any response's head
    max_misses: int = 3  # failed health checks in a row until the replica counts as lost
    missed_heartbeats: int = 2  # heartbeat intervals without a frame until the stream counts as silent
    reopen_after_s: float = 5.0  # reconnect a silent stream after this time although /health answers
    poll_every_s: float = 1.0  # pause between health checks of a polled or silent replica
    polls_between_models: int = 30  # health checks between two reads of /v1/models and tries of the stream
    polls_between_metrics: int = 5  # health checks between two reads of /metrics
    reads_metrics: bool = True
    least_wait_s: float = 0.1
    most_wait_s: float = 2.0
    stable_s: float = 5.0  # a stream that was exact for this long resets the back-off

    def headers(self) -> dict[str, str]:
        secret = self.secret.current
        headers = {SECRET_HEADER: secret} if secret else {}
        return headers | ({"authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContext:
    """Objects that all clients of one fleet share. `large_chunks`: lock held while a large chunk is applied."""

    session: aiohttp.ClientSession
    index: PrefixIndex
    settings: FollowSettings
    on_change: Callable[[Replica], None]
    on_load_update: Callable[[Replica], None]
    large_chunks: asyncio.Lock = field(default_factory=asyncio.Lock)


class NoStream(Exception):
    """The server has no `/kv/events`, or runs with `--no-kv-stream`."""


class StreamSilent(Exception):
    """The stream sends nothing although the replica answers `/health`."""


class KVStreamClient:
    def __init__(self, replica: Replica, context: ClientContext) -> None:
        self.replica = replica
        self._context = context
        settings = context.settings
        self._status = ReplicaStatus(replica, context.on_change)
        self._client = PollingClient(context.session, replica.url, settings.headers)
        self._health = HealthCheck(
            self._client,
            timeout_s=settings.answer_timeout_s,
            pause_s=settings.poll_every_s,
            max_misses=settings.max_misses,
        )
        self._backoff = Backoff(least_s=settings.least_wait_s, most_s=settings.most_wait_s, stable_s=settings.stable_s)
        self._exact_since_s: float | None = None
        self._max_silence_s = settings.answer_timeout_s

    async def run(self) -> None:
        blocks = self._start_mirror()
        try:
            while True:
                await self._run_connection(blocks)
                wait_s = self._backoff.next_wait_s(lasted_s=self._exact_s())
                blocks.release()
                blocks = self._start_mirror()
                await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self._drop_mirror(blocks)
            self._status.set_state("gone", "discovery no longer lists it")
            raise
        except Exception as error:  # a bug in the router: the supervisor logs it and starts another client
            self._drop_mirror(blocks)
            self._status.set_state("connecting", f"following its KV stream failed: {error!r}")
            raise

    def _drop_mirror(self, blocks: BlockMirror) -> None:
        blocks.release()
        self.replica.blocks = None

    def _start_mirror(self) -> BlockMirror:
        self.replica.blocks = blocks = BlockMirror(self._context.index)
        self._exact_since_s = None
        self.replica.is_silent = False
        return blocks

    def _exact_s(self) -> float:
        since_s = self._exact_since_s
        return 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s

    async def _run_connection(self, blocks: BlockMirror) -> None:
        """Read the stream, or poll the replica, until that fails; then set the replica's new state."""
        replica = self.replica
        try:
            while True:
                try:
                    await self._read_stream(blocks)
                except NoStream:
                    await self._poll()
        except (StreamBroken, FrameError, StreamSilent) as error:
            replica.num_faults += not isinstance(error, StreamSilent)
            state: State = "blind" if replica.state in ("exact", "blind") else "connecting"
            self._status.set_state(state, str(error), is_new_reason=replica.state == "connecting")
        except (ConnectionLost, aiohttp.ClientError, TimeoutError, OSError) as error:
            if not (isinstance(error, TimeoutError) and replica.state == "blind" and await self._is_healthy()):
                self._set_connecting(error)

    def _set_connecting(self, error: Exception) -> None:
        settings = self._context.settings
        why = describe_failure(error, settings.answer_timeout_s)
        self._status.log_first_failure(error, why)
        self._status.set_state(
            "connecting",
            why,
            is_new_reason=isinstance(error, ConnectionLost),
            is_unresponsive=self._client.num_unanswered >= settings.max_misses,
        )

    async def _read_stream(self, blocks: BlockMirror) -> None:
        """Apply the stream's frames to `blocks`. Always ends with an error: NoStream, ConnectionLost or a bad frame."""
        reader = FrameReader()
        async with self._client.open("/kv/events", self._context.settings.answer_timeout_s) as response:
            if response.status in NO_STREAM or (response.status == 200 and response.content_type != MEDIA_TYPE):
                raise NoStream
            if response.status != 200:
                raise ConnectionLost(f"/kv/events answered {response.status}{HINTS.get(response.status, '')}")
            while chunk := await self._read_chunk(response.content):
                if len(chunk) < LARGE_BYTES:
                    for frame in reader.feed(chunk):
                        self._handle_frame(blocks, frame)
                else:
                    await self._handle_large_chunk(blocks, reader, chunk)
        raise ConnectionLost("its KV stream ended")

    async def _poll(self) -> None:
        """Poll a replica without a KV stream for `polls_between_models` health checks. Raises if the replica fails."""
        settings, replica = self._context.settings, self.replica
        replica.hello, replica.load, replica.adapter_file, replica.tenants = None, ReplicaLoad(), None, {}
        lengths, adapters = await self._client.models(settings.answer_timeout_s)
        replica.lengths = {name: length for name, length in lengths.items() if length is not None}
        if lengths.keys() - adapters != replica.models or adapters != replica.adapters.keys():
            replica.models = frozenset(lengths.keys() - adapters)
            replica.adapters = dict.fromkeys(adapters, "")
            self._context.on_change(replica)
        for poll in range(settings.polls_between_models):
            if settings.reads_metrics and poll % settings.polls_between_metrics == 0:
                replica.load = await self._client.load(settings.answer_timeout_s)
            self._status.set_state("blind", "it has no KV stream")
            await asyncio.sleep(settings.poll_every_s)
            await self._health.run(self._status.set_silent)

    async def _read_chunk(self, content: aiohttp.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._max_silence_s):
                return await content.readany()
        except TimeoutError:  # if bytes have arrived by now, this process was delayed, not the replica
            return content.read_nowait() or await self._wait_out_silence(content)
        except aiohttp.ClientPayloadError:
            raise ConnectionLost("the connection broke") from None

    async def _wait_out_silence(self, content: aiohttp.StreamReader) -> bytes:
        """Check `/health` until the stream sends bytes, and return these. Raises ConnectionLost or StreamSilent."""
        if self.replica.state in ("exact", "blind"):
            self.replica.is_silent = True
            self._status.set_state("blind", f"its KV stream has been silent for {self._max_silence_s:g} s")
            self._context.on_change(self.replica)  # `is_silent` changed, even if the state was blind before
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
        self._status.set_silent(False)
        return data

    async def _check_silent_replica(self) -> None:
        """Check `/health` for `reopen_after_s`. Raises ConnectionLost if a check fails, StreamSilent at the end."""
        settings, clock = self._context.settings, asyncio.get_running_loop().time
        reopen_s = clock() + settings.reopen_after_s
        self._client.num_unanswered = 0  # the stream has sent bytes since the last failure
        while clock() < reopen_s:
            await self._health.run(self._status.set_silent)
            await asyncio.sleep(settings.poll_every_s)
        raise StreamSilent(f"its KV stream was silent for more than {settings.reopen_after_s:g} s")

    async def _is_healthy(self) -> bool:
        try:
            await self._health.run(self._status.set_silent)
        except ConnectionLost:
            return False
        return True

    async def _handle_large_chunk(self, blocks: BlockMirror, reader: FrameReader, chunk: bytes) -> None:
        async with self._context.large_chunks:
            for frame in reader.feed(chunk):
                self._handle_frame(blocks, frame)
                await asyncio.sleep(0)

    def _handle_frame(self, blocks: BlockMirror, frame: Frame) -> None:
        replica = self.replica
        accepted = replica.load.accepts
        if type(frame) is Bye and not frame.again:
            raise ConnectionLost(frame.reason)
        blocks.feed(frame)
        if isinstance(frame, (Part, Step)):
            replica.update_tenants(frame.tenants)
        if type(frame) is Step and frame.adapters is not None:
            replica.adapters = frame.adapters
            self._context.on_change(replica)
        if type(frame) is Step and frame.adapter_file is not None:
            replica.adapter_file = frame.adapter_file
        if type(frame) is Step and replica.state == "exact":
            replica.load = frame.load
            if frame.load.accepts is not accepted:
                self._context.on_change(replica)
        elif isinstance(frame, Hello):
            self._handle_hello(frame)
        elif blocks.state == "exact":
            self._set_exact(blocks)
        self._context.on_load_update(replica)

    def _handle_hello(self, hello: Hello) -> None:
        replica = self.replica
        replica.hello, replica.models = hello, frozenset(hello.models)
        replica.adapters, replica.adapter_file, replica.tenants = hello.adapters, hello.adapter_file, {}
        self._max_silence_s = min(MAX_SILENCE_S, self._context.settings.missed_heartbeats * max(hello.heartbeat_s, 0.1))
        if replica.admitted_epoch == hello.epoch:
            self._status.set_state("blind", "its snapshot is being read")
        else:
            self._status.set_state("loading", "its snapshot is being read")

    def _set_exact(self, blocks: BlockMirror) -> None:
        assert blocks.hello is not None
        self.replica.load = blocks.load
        self.replica.admitted_epoch = blocks.hello.epoch
        self._exact_since_s = self._exact_since_s or asyncio.get_running_loop().time()
        self._status.set_state("exact", "the index holds every change so far")
