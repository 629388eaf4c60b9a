"""The frames of the KV stream (docs/reference/kv-stream.md): msgpack maps, each after its length (little-endian u32).

The replica writes them, the router reads them. A reader ignores unknown fields, so that either side can be newer.
"""

import struct
from collections.abc import Iterator

import msgspec

VERSION = 1
MEDIA_TYPE = "application/x-octavo-kv"
MAX_FRAME_BYTES = 1024 * 1024  # room for the names and hashes of all adapters
_LENGTH = struct.Struct("<I")


class ReplicaLoad(msgspec.Struct, kw_only=True):
    """The replica's work. `accepts`: it accepts new requests. `step_tokens`, `step_ms`: tokens and duration of the
    latest step.

    `received`: requests from all senders since the engine started; the other figures include exactly these.
    `waiting_cached_tokens`: tokens that waiting requests will find cached; `prefill_backlog_tokens` counts their whole
    prompts.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    prefill_backlog_tokens: int = 0
    waiting_cached_tokens: int = 0
    received: int = 0
    step_tokens: int = 0
    step_ms: float = 0.0
    accepts: bool = True


class TenantLoad(msgspec.Struct, array_like=True):
    """A tenant's work at a replica. `running`: its running sequences; `unfinished`: its requests that have not ended;
    `requests`, `tokens`: new requests, and their prompt and generated tokens, in the last `Hello.tenant_window_s`;
    `received`: all requests since the tenant last had no work.

    After a load of zeros, a tenant is reported once it has work again.
    """

    running: int = 0
    unfinished: int = 0
    requests: int = 0
    tokens: int = 0
    received: int = 0


class AdapterFile(msgspec.Struct, frozen=True):
    """State of the file of adapters that a replica follows. `digest`: see `api/adapter_file.py`. `missing`: adapters of
    the file that are not loaded -> the reason, empty while they are being loaded.
    """

    digest: str
    missing: dict[str, str] = {}


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """The first frame. `epoch` is new with each start of the engine; `root` is the hash before every prompt's first
    block, `card` the fingerprint of the card that `GET /kv/model` returns. `weights_bytes`, `kv_bytes`: memory of the
    weights and of the KV cache. `revision`: version of the downloaded model, empty for local files. `startup_s`: see
    `ReadyInfo`. `adapters`: hashes of the loaded adapters, by name. `adapter_file`: None if the replica follows none.
    `tenant_window_s`: 0 if it reports no tenants.
    """

    version: int
    epoch: int
    block_size: int
    root: bytes
    max_model_len: int
    models: list[str]
    heartbeat_s: float
    card: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    revision: str = ""
    startup_s: dict[str, float] = {}
    adapters: dict[str, str] = {}
    adapter_file: AdapterFile | None = None
    tenant_window_s: float = 0.0


class Part(msgspec.Struct, tag="part", kw_only=True):
    """A part of the snapshot: tenants, and concatenated short hashes of blocks on the device and in host memory."""

    device: bytes = b""
    host: bytes = b""
    tenants: dict[str, TenantLoad] = {}


class Snapshot(msgspec.Struct, tag="snapshot", kw_only=True):
    """The end of the snapshot: the `Part` frames before it hold all of the replica's blocks as of frame `seq`."""

    epoch: int
    seq: int
    digest: int
    load: ReplicaLoad


class Step(msgspec.Struct, tag="step", kw_only=True, omit_defaults=True):
    """A change of the blocks, the load or the adapters; `seq` increases by one. A heartbeat has no change and the
    latest `seq`.

    `coming`: blocks that a request which just arrived will store on the device, unless it fails. `adapters`: all of
    them, if they have changed. `adapter_file`: its state, if that has changed. `tenants`: those whose work changed.
    """

    epoch: int
    seq: int
    digest: int
    load: ReplicaLoad
    stored: bytes = b""
    removed: bytes = b""
    host_stored: bytes = b""
    host_removed: bytes = b""
    coming: bytes = b""
    adapters: dict[str, str] | None = None
    adapter_file: AdapterFile | None = None
    tenants: dict[str, TenantLoad] = {}


class Bye(msgspec.Struct, tag="bye", omit_defaults=True):
    """The last frame. `reason`: why the replica ends the stream. `again`: a new connection would get a snapshot."""

    reason: str
    again: bool = True


Frame = Hello | Part | Snapshot | Step | Bye

_encode = msgspec.msgpack.Encoder().encode
_decoder: "msgspec.msgpack.Decoder[Frame]" = msgspec.msgpack.Decoder(Frame)


class FrameError(Exception):
    """The bytes are not a valid KV stream."""


def write(frame: Frame) -> bytes:
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits the bytes of a stream into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add `data` and yield the frames that it completes. Raises FrameError, after which the reader is unusable."""
        pending = self._pending
        pending += data
        start = 0
        try:
            while len(pending) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(pending, start)
                if size > MAX_FRAME_BYTES:
                    raise FrameError(f"a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}.")
                end = start + _LENGTH.size + size
                if end > len(pending):
                    break
                body = bytes(pending[start + _LENGTH.size : end])
                start = end
                yield _read(body)
        finally:
            del pending[:start]


def _read(body: bytes) -> Frame:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"a frame is invalid: {error}.") from None
