"""KV events in vLLM's format, over ZeroMQ, for routers made for vLLM (docs/reference/kv-events-zmq.md).

Unlike the KV stream, the events hold tokens, include no snapshot, and can't be checked for completeness. A client can
request a replay of a bounded number of past batches. Sending never waits: ZeroMQ drops messages for slow subscribers.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
from octavo_engine.settings.records import KVEventsConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.kv_stream import KVChange, StoredBlock, numbers

from octavo_server.supervise import supervised

if TYPE_CHECKING:
    from octavo_engine.frontend.async_llm import AsyncLLM
    from octavo_engine.wire.records import EngineStats

logger = logging.getLogger(__name__)

MEDIUM = "GPU"  # vLLM's word for the memory that attention reads
RANK = 0
SEQ_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
REPLAY_TIMEOUT_S = 5.0  # limit for a client to receive one batch of a replay

_encode = msgspec.msgpack.Encoder().encode


class ZmqEvents:
    """Belongs to one event loop. Raises StartupError for an unusable endpoint."""

    def __init__(self, config: KVEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._seq = 0
        self._num_stored = 0
        self._publisher = self._context.socket(zmq.PUB)
        self._router = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
        self._router.router_mandatory = True  # a send waits for a slow client; ZeroMQ would drop the batch otherwise
        self._replaying: asyncio.Task[None] | None = None
        try:
            _open(self._publisher, config.endpoint, hwm=config.hwm, binds=_is_bound(config.endpoint))
            if config.replay_endpoint is not None:
                _open(self._router, config.replay_endpoint, hwm=config.hwm, binds=True)
                self._replaying = supervised("replaying KV events", self._replay)
        except StartupError:
            self._close_sockets()
            raise

    def attach(self, client: "AsyncLLM") -> None:
        """Publish the KV changes that `client` reports, each after calling the `on_kv` callback that was set before."""
        previous, block_size = client.on_kv, client.ready_info.block_size

        def on_kv(change: KVChange | None, stats: "EngineStats") -> None:
            if previous is not None:
                previous(change, stats)
            if change is not None:
                self.publish(change, block_size, {each.hash: name for name, each in client.adapters.items()})

        client.on_kv = on_kv

    def publish(self, change: KVChange, block_size: int, adapters: Mapping[str, str]) -> None:
        """Send the events of a change. `adapters`: their names, by hash."""
        events = [*self._removed(change), *(_stored(run, block_size, adapters) for run in _runs(change.blocks))]
        if not events:
            return
        seq, payload = self._seq.to_bytes(SEQ_BYTES, "big"), _encode([time.time(), events, RANK])
        self._seq += 1
        self._sent.append((seq, payload))
        self._publisher.send_multipart([self._topic, seq, payload], zmq.NOBLOCK)

    async def close(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._router.close(linger=0)
        self._publisher.close(linger=0)
        self._context.term()

    def _removed(self, change: KVChange) -> Iterator[list[Any]]:
        removed = numbers(change.removed)
        self._num_stored -= len(removed)
        if removed:
            yield ["BlockRemoved", [*removed], MEDIUM] if self._num_stored else ["AllBlocksCleared"]
        self._num_stored += len(numbers(change.stored))

    async def _replay(self) -> None:
        """Serve replay requests, one at a time. The last frame of a request is the first sequence number to send."""
        while True:
            client, *rest = await self._router.recv_multipart()
            start = rest[-1] if rest else b""
            if len(start) != SEQ_BYTES:
                logger.warning("a request to replay KV events has %d bytes, expected %d", len(start), SEQ_BYTES)
                continue
            batches = [batch for batch in self._sent if batch[0] >= start]
            with suppress(TimeoutError, zmq.ZMQError):  # the client is too slow, or gone
                for seq, payload in [*batches, (END_OF_REPLAY, b"")]:
                    async with asyncio.timeout(REPLAY_TIMEOUT_S):
                        await self._router.send_multipart([client, b"", seq, payload])


@asynccontextmanager
async def zmq_events(config: KVEventsConfig | None) -> AsyncIterator[ZmqEvents | None]:
    """Open the event sockets of a server, and close them at the end. None without a config. Raises StartupError."""
    events = None if config is None else ZmqEvents(config)
    try:
        yield events
    finally:
        if events is not None:
            await events.close()


def _open(opened: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str, *, hwm: int, binds: bool) -> None:
    opened.set_hwm(hwm)
    try:
        if binds:
            opened.bind(endpoint)
        else:
            opened.connect(endpoint)
    except zmq.ZMQError as error:
        raise StartupError(f"--kv-events-config: cannot use the endpoint {endpoint!r}: {error}.") from None


def _is_bound(endpoint: str) -> bool:
    """True if the publisher binds the endpoint instead of connecting, by vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _runs(blocks: list[StoredBlock]) -> Iterator[list[StoredBlock]]:
    """Group blocks that follow each other in one prompt."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end].parent != blocks[end - 1].hash:
            yield blocks[start:end]
            start = end


def _stored(run: list[StoredBlock], block_size: int, adapters: Mapping[str, str]) -> list[Any]:
    """Return the event for a run of blocks, all of one prompt."""
    first = run[0]
    adapter = adapters.get(first.adapter, first.adapter)  # it may have been unloaded in the meantime
    extra_keys = [_extra_keys(block, adapter) for block in run]
    return [
        "BlockStored",
        [numbers(block.hash)[0] for block in run],
        None if first.parent is None else numbers(first.parent)[0],
        [token for block in run for token in block.token_ids],
        block_size,
        None,
        MEDIUM,
        adapter or None,
        extra_keys if any(extra_keys) else None,
    ]


def _extra_keys(block: StoredBlock, adapter: str) -> list[Any] | None:
    """Return vLLM's keys of a block. Only a prompt's first block has the salt, as the later hashes include its hash."""
    keys: list[Any] = [adapter] if adapter else []
    keys += [[digest.hex(), start] for digest, start in block.images]
    keys += [block.salt] if block.salt and block.parent is None else []
    return keys or None
