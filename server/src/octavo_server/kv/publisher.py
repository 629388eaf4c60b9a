"""`KVPublisher` copies the set of the engine's KV blocks, numbers its changes, and publishes them to all listeners.

The engine core only reports the change of each step; snapshots are built from the copy in the API process, so the step
loop never waits for a listener. A frame is encoded once for all listeners. A listener whose backlog outgrows the limit
is dropped with a reason: a new snapshot costs less than the missed frames.

The core receives new requests between two steps, and a step with long prompts may take a second. So the publisher
counts requests on their way to the core (`PendingPrompts`) as waiting.

Routers compare the limits of tenants with the work of the last minute that all replicas report (`TenantWindow`).
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from octavo_engine.wire.hashing import SHORT_BYTES
from octavo_engine.wire.kv_stream import KVChange, KVSet, run_together

from octavo_server.kv.frames import (
    VERSION,
    AdapterFile,
    Bye,
    Hello,
    Part,
    ReplicaLoad,
    Snapshot,
    Step,
    TenantLoad,
    write,
)
from octavo_server.kv.pending_prompts import PendingPrompts, full_blocks

if TYPE_CHECKING:
    from octavo_engine.settings.records import ReadyInfo
    from octavo_engine.wire.records import EngineRequest, EngineStats, TenantUsage

HEARTBEAT_S = 0.5
PART_HASHES = 2048  # most hashes of a tier (device, host) in one frame, so that it delays a reader only briefly
MAX_BACKLOG_BYTES = 8 * 1024 * 1024
TENANT_WINDOW_S = 60
TENANTS_EVERY_S = 0.1
MAX_TENANTS = 256  # most tenants in one frame, which bounds its bytes; the others are in the next one
_NO_CHANGE = KVChange()
_NO_WORK = TenantLoad()


class Listener:
    """Frames that one reader has not received yet. `bye`: the last frame for it, once it was dropped."""

    def __init__(self, max_backlog_bytes: int) -> None:
        self.bye: Bye | None = None
        self._max_backlog_bytes = max_backlog_bytes
        self._frames: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._wakeup = asyncio.Event()

    def push(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._backlog_bytes += len(frame)
        self._wakeup.set()
        if self._backlog_bytes > self._max_backlog_bytes:
            self.drop(Bye(f"slow reader: more than {self._max_backlog_bytes} bytes behind; connect again"))

    def drop(self, bye: Bye) -> None:
        self.bye = bye
        self._frames.clear()
        self._wakeup.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait for frames, at most `timeout_s`.

        `asyncio.wait_for` is avoided: in Python 3.11 it swallows a cancellation that coincides with the event.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wakeup.wait()

    def take_frames(self) -> bytes:
        """Return all frames as one piece, possibly empty."""
        frames = b"".join(self._frames)
        self._frames.clear()
        self._backlog_bytes = 0
        self._wakeup.clear()
        return frames


class TenantWindow:
    """The work of each tenant that has requests now or had some in the last `TENANT_WINDOW_S`.

    `changed`: names of tenants whose work has changed since it was published, the longest waiting first.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.loads: dict[str, TenantLoad] = {}
        self.changed: dict[str, None] = {}
        self._clock = clock
        self._seconds: deque[tuple[int, dict[str, TenantLoad]]] = deque()  # work that each second added

    def add_request(self, name: str, num_prompt_tokens: int) -> None:
        self._add(name, TenantLoad(unfinished=1, requests=1, tokens=num_prompt_tokens, received=1))

    def end_request(self, name: str) -> None:
        self._add(name, TenantLoad(unfinished=-1))

    def add_usage(self, usages: "dict[str, TenantUsage]") -> None:
        for name, usage in usages.items():
            self._add(name, TenantLoad(running=usage.running, tokens=usage.generation_tokens))

    def expire(self) -> None:
        """Subtract work older than the window."""
        while self._seconds and self._seconds[0][0] + 1 + TENANT_WINDOW_S <= self._clock():
            for name, old in self._seconds.popleft()[1].items():
                self._change(name, TenantLoad(requests=-old.requests, tokens=-old.tokens))

    def take_changed(self) -> dict[str, TenantLoad]:
        names = [*islice(self.changed, MAX_TENANTS)]
        for name in names:
            del self.changed[name]
        return {name: self.loads.get(name, _NO_WORK) for name in names}

    def _add(self, name: str, change: TenantLoad) -> None:
        self.expire()
        self._change(name, change)
        if change.requests or change.tokens:
            second = int(self._clock())
            if not self._seconds or self._seconds[-1][0] != second:
                self._seconds.append((second, {}))
            added = self._seconds[-1][1].setdefault(name, TenantLoad())
            added.requests += change.requests
            added.tokens += change.tokens

    def _change(self, name: str, change: TenantLoad) -> None:
        load = self.loads.setdefault(name, TenantLoad())
        load.running += change.running
        load.unfinished += change.unfinished
        load.requests += change.requests
        load.tokens += change.tokens
        load.received += change.received
        self.changed[name] = None
        if not (load.running or load.unfinished or load.requests or load.tokens):
            del self.loads[name]


class KVPublisher:
    def __init__(
        self,
        ready: "ReadyInfo",
        models: tuple[str, ...],
        *,
        card: str = "",
        heartbeat_s: float = HEARTBEAT_S,
        has_prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`card`: fingerprint of the model card. `has_prefix_cache`: False if the engine caches no prefixes."""
        self.kv_set = KVSet()
        self.max_backlog_bytes = MAX_BACKLOG_BYTES
        self._heartbeat_s = heartbeat_s
        self._has_prefix_cache = has_prefix_cache
        self._seq = 0
        self._digest = 0  # computed by the engine core, so that it also reveals errors in the copy
        self._pending = PendingPrompts(ready.block_size)
        self._core_load = ReplicaLoad(free_blocks=ready.num_blocks, total_blocks=ready.num_blocks)  # the latest report
        self._load = self._core_load
        self._listeners: set[Listener] = set()
        self._tenants = TenantWindow(clock)
        self._tenants_timer: asyncio.TimerHandle | None = None
        self._tenants_due_s = 0.0  # by the loop's clock
        self._hello = Hello(
            version=VERSION,
            epoch=secrets.randbits(64),
            block_size=ready.block_size,
            root=ready.hash_root,
            max_model_len=ready.max_model_len,
            models=[*models],
            heartbeat_s=heartbeat_s,
            card=card,
            weights_bytes=ready.weights_bytes,
            kv_bytes=ready.kv_bytes,
            revision=ready.revision,
            startup_s=ready.startup_s,
            adapters=ready.adapters,
            tenant_window_s=TENANT_WINDOW_S,
        )

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def publish(self, change: KVChange | None, stats: "EngineStats") -> None:
        """Publish a step of the engine if it changed the blocks, or a figure of the load that routing uses."""
        self._tenants.add_usage(stats.tenants)
        self._schedule_tenants()
        before = self._load
        self._core_load = load_of(stats, accepts=before.accepts)
        self._load = self._pending.add_to_load(self._core_load)
        if change is not None:
            for part in _parts(change, self._digest):
                self.kv_set.apply(part)
                self._push_step(part)
        elif changes_routing(before, self._load):
            self._push_step(_NO_CHANGE)

    def announce_request(self, request: "EngineRequest") -> None:
        """Publish a received request at once, before the core receives it."""
        hello, needs_blocks = self._hello, bool(self._has_prefix_cache and self._listeners)
        blocks = full_blocks(request, hello.root, hello.block_size) if needs_blocks else ()
        prompt = self._pending.add(request, blocks, self.kv_set.has)
        self._load = self._pending.add_to_load(self._core_load)
        self._push_step(_NO_CHANGE, coming=run_together(prompt.coming))

    def add_request(self, tenant: str, num_prompt_tokens: int) -> None:
        """Count a request of a client, which `end_request` follows."""
        self._tenants.add_request(tenant, num_prompt_tokens)
        self._schedule_tenants()

    def end_request(self, tenant: str) -> None:
        self._tenants.end_request(tenant)
        self._schedule_tenants()

    def tenant_loads(self) -> "Mapping[str, TenantLoad]":
        self._tenants.expire()
        return self._tenants.loads

    def _schedule_tenants(self) -> None:
        """Publish changes of tenants' work at once, or `TENANTS_EVERY_S` after the latest ones."""
        if not self._listeners:
            self._tenants.changed.clear()
        elif self._tenants.changed and self._tenants_timer is None:
            loop = asyncio.get_running_loop()
            self._tenants_timer = loop.call_at(max(self._tenants_due_s, loop.time()), self._push_tenants)

    def _push_tenants(self) -> None:
        self._tenants_timer = None
        self._tenants_due_s = asyncio.get_running_loop().time() + TENANTS_EVERY_S
        if tenants := self._tenants.take_changed():
            self._push_step(_NO_CHANGE, tenants=tenants)
        self._schedule_tenants()

    def set_accepts(self, accepts: bool) -> None:
        """Publish at once whether the replica accepts new requests."""
        if self._load.accepts != accepts:
            self._core_load = msgspec.structs.replace(self._core_load, accepts=accepts)
            self._load = self._pending.add_to_load(self._core_load)
            self._push_step(_NO_CHANGE)

    def set_adapters(self, adapters: dict[str, str]) -> None:
        """Publish at once the hashes of the loaded adapters, by name."""
        self._hello = msgspec.structs.replace(self._hello, adapters=adapters)
        self._push_step(_NO_CHANGE, adapters=adapters)

    def set_adapter_file(self, state: AdapterFile) -> None:
        """Publish at once the state of the file of adapters."""
        self._hello = msgspec.structs.replace(self._hello, adapter_file=state)
        self._push_step(_NO_CHANGE, adapter_file=state)

    def _push_step(self, change: KVChange, **changed: Any) -> None:
        """`changed`: further fields of the frame."""
        self._seq += 1
        if change is not _NO_CHANGE:
            self._digest = change.digest
        if self._listeners:
            frame = self._step(change, **changed)
            for listener in [*self._listeners]:
                listener.push(frame)

    def close(self, reason: str) -> None:
        """End every stream with `reason`, as the replica stops."""
        for listener in self._listeners:
            listener.drop(Bye(reason, again=False))

    def snapshot(self) -> Iterator[bytes]:
        """Frames that describe the current set of blocks. Later changes don't affect them."""
        device, host, tenants = [*self.kv_set.device], [*self.kv_set.host], [*self._tenants.loads.items()]
        end = Snapshot(epoch=self._hello.epoch, seq=self._seq, digest=self._digest, load=self._load)
        return self._snapshot(device, host, tenants, end)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield a snapshot, then every change, until the listener is dropped."""
        listener = Listener(self.max_backlog_bytes)
        snapshot = self.snapshot()
        self._listeners.add(listener)
        try:
            for frame in snapshot:
                yield frame
            await listener.wait(self._heartbeat_s)
            while listener.bye is None:
                self._tenants.expire()
                self._schedule_tenants()
                yield listener.take_frames() or self._step(_NO_CHANGE)
                await listener.wait(self._heartbeat_s)
            yield write(listener.bye)
        finally:
            self._listeners.discard(listener)

    def _snapshot(
        self, device: list[int], host: list[int], tenants: list[tuple[str, TenantLoad]], end: Snapshot
    ) -> Iterator[bytes]:
        """Pack each part when it is requested: packing a million hashes at once would delay the streams of requests."""
        yield write(self._hello)
        for start in range(0, max(len(device), len(host)), PART_HASHES):
            part = slice(start, start + PART_HASHES)
            yield write(Part(device=run_together(device[part]), host=run_together(host[part])))
        for start in range(0, len(tenants), MAX_TENANTS):
            yield write(Part(tenants=dict(tenants[start : start + MAX_TENANTS])))
        yield write(end)

    def _step(self, change: KVChange, **changed: Any) -> bytes:
        return write(
            Step(
                epoch=self._hello.epoch,
                seq=self._seq,
                digest=self._digest,
                load=self._load,
                stored=change.stored,
                removed=change.removed,
                host_stored=change.host_stored,
                host_removed=change.host_removed,
                **changed,
            )
        )


def load_of(stats: "EngineStats", *, accepts: bool = True) -> ReplicaLoad:
    return ReplicaLoad(
        running=stats.running,
        waiting=stats.waiting,
        free_blocks=stats.free_blocks,
        cached_blocks=stats.cached_blocks,
        total_blocks=stats.total_blocks,
        prefill_backlog_tokens=stats.prefill_backlog_tokens,
        received=stats.received,
        step_tokens=stats.batched_tokens,
        step_ms=stats.step_s * 1000,
        accepts=accepts,
    )


def changes_routing(before: ReplicaLoad, now: ReplicaLoad) -> bool:
    """True if the load changed in a figure that routing uses; the latest step's tokens and time don't count."""
    old = (before.running, before.waiting, before.prefill_backlog_tokens)
    return old != (now.running, now.waiting, now.prefill_backlog_tokens)


def _parts(change: KVChange, digest: int) -> Iterator[KVChange]:
    """Split a change so that each part fits a frame of the usual size: a reset of a large cache takes megabytes."""
    width = PART_HASHES * SHORT_BYTES
    rest = max(len(change.stored), len(change.removed), len(change.host_stored), len(change.host_removed))
    for start in range(0, rest - width, width):
        part = _cut(change, start, start + width)
        digest = part.digest = part.roll(digest)
        yield part
    yield _cut(change, max(0, (rest - 1) // width * width), rest) if rest > width else change


def _cut(change: KVChange, start: int, end: int) -> KVChange:
    """Return a slice of the change, with the digest of the whole change."""
    return KVChange(
        stored=change.stored[start:end],
        removed=change.removed[start:end],
        host_stored=change.host_stored[start:end],
        host_removed=change.host_removed[start:end],
        digest=change.digest,
    )
