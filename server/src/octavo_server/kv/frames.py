"""The frames of the KV stream (docs/reference/kv-stream.md): msgpack maps, each after its length (little-endian u32).

Shared by the replica that writes them and the router that reads them. A frame of a type, or a field, that a reader
doesn't know is skipped, so that either side can be newer.
"""

import struct
from collections.abc import Iterator

import msgspec

VERSION = 1
MEDIA_TYPE = "application/x-octavo-kv"
MAX_FRAME_BYTES = 256 * 1024
_LENGTH = struct.Struct("<I")


class Load(msgspec.Struct, kw_only=True):
    """What the replica has to do, and whether it takes more. `step_tokens` took the latest step `step_ms`.

    `received`: requests since the engine started, from anybody; those are what the other figures tell of.
    `waiting_cached_tokens`: of the backlog, what those who wait will find; the backlog has their prompts whole.
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


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """First. `epoch` is new with each start of the engine; `root` is the hash before every prompt's first block, `card`
    the fingerprint of what `GET /kv/model` answers. `weights_bytes` and `kv_bytes`: the memory that each takes.
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


class Part(msgspec.Struct, tag="part", kw_only=True):
    """A piece of the snapshot, as short hashes run together."""

    device: bytes = b""
    host: bytes = b""


class Snapshot(msgspec.Struct, tag="snapshot", kw_only=True):
    """The parts before it were all of the set, as of frame `seq`."""

    epoch: int
    seq: int
    digest: int
    load: Load


class Step(msgspec.Struct, tag="step", kw_only=True, omit_defaults=True):
    """One step's change; `seq` is the one before plus one. A heartbeat repeats the latest `seq` and changes nothing.

    `coming`: blocks that a request which has just been received will have stored on the device, unless it fails.
    """

    epoch: int
    seq: int
    digest: int
    load: Load
    stored: bytes = b""
    removed: bytes = b""
    host_stored: bytes = b""
    host_removed: bytes = b""
    coming: bytes = b""


class Bye(msgspec.Struct, tag="bye", omit_defaults=True):
    """Last: why the replica ends the stream. `again`: whoever connects again gets a snapshot."""

    reason: str
    again: bool = True


Frame = Hello | Part | Snapshot | Step | Bye

_encode = msgspec.msgpack.Encoder().encode
_decoder: "msgspec.msgpack.Decoder[Frame]" = msgspec.msgpack.Decoder(Frame)


class FrameError(Exception):
    """The bytes are no KV stream."""


def write(frame: Frame) -> bytes:
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes as they come in, frames as they are complete."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Raises FrameError, after which the stream is of no use."""
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
    except msgspec.MsgspecError as error:
        raise FrameError(f"a frame that can't be read: {error}.") from None
