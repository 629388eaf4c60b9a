"""Messages between a front end and its engine core process: msgpack of the wire records.

There are two one-way streams. To the core: `Add`, `Abort`, `Call`, `AdapterCall`, `Stop`. From the core: `Hello` once
(both sockets are connected), then `Ready` or `Failed`, then `CoreOutputs` in `Outputs`, and for each call an `Answered`
or `CallFailed`; `Failed` is the last message. In a pipe, each message comes after its length in 4 bytes.
"""

import os

import msgspec

from octavo_engine.log_format import LogFormat
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.errors import StartupCode
from octavo_engine.wire.inspection import AdapterCallName, Answer, CallName
from octavo_engine.wire.records import CoreOutputs, EngineRequest, ErrorInfo, SeqOutput
from octavo_engine.wire.sleep import MemoryTag

_LENGTH_BYTES = 4


class Start(msgspec.Struct, kw_only=True):
    """The core's whole configuration, sent on its standard input. `loader`: "module:function", see `loop.start`."""

    config: EngineConfig
    loader: str
    folder: str
    parent_pid: int
    log_format: LogFormat = "text"


class Add(msgspec.Struct, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    request_id: str
    index: int | None = None


class Call(msgspec.Struct, tag=True):
    """A function call to the core, which answers between two steps, or at once while no request runs."""

    call_id: int
    name: CallName
    tags: list[MemoryTag] = []


class AdapterCall(msgspec.Struct, tag=True):
    """A call about an adapter. `adapter`: for a load, the folder (the answer comes later); for an unload, the hash of
    the adapter that was loaded from `location`.

    "end_load" has the `call_id` of a load, which is answered at once, and no answer of its own.
    """

    call_id: int
    name: AdapterCallName
    adapter: str
    location: str = ""


class Stop(msgspec.Struct, tag=True):
    pass


class Hello(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    info: ReadyInfo


class Failed(msgspec.Struct, tag=True):
    """The core could not start, or has lost its device or a rank and ends. `message`: one line for the user."""

    message: str
    code: StartupCode = "StartupFailed"


class Outputs(msgspec.Struct, tag=True):
    core: CoreOutputs


class Answered(msgspec.Struct, tag=True):
    call_id: int
    answer: Answer


class CallFailed(msgspec.Struct, tag=True):
    """The call raised Unavailable, or InvalidRequest. `message`: for the user."""

    call_id: int
    message: str
    is_invalid: bool = False


ToCore = Add | Abort | Call | AdapterCall | Stop
FromCore = Hello | Ready | Failed | Outputs | Answered | CallFailed

encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode


def refusal(data: bytes, error: msgspec.ValidationError) -> CoreOutputs:
    """Return the terminal records of an `Add` whose request has a value of the wrong type, so that only it fails."""
    request = msgspec.msgpack.decode(data)["request"]
    info = ErrorInfo(f"the engine core can't read the request: {error}.", "invalid_request")
    return CoreOutputs(
        outputs=[
            SeqOutput(request_id=request["request_id"], index=index, finish_reason="error", error=info)
            for index in range(request["params"]["n"])
        ]
    )


def read_message(fd: int) -> bytes | None:
    """Read the next message; None once the other end is closed."""
    length = _read_exactly(fd, _LENGTH_BYTES)
    return None if length is None else _read_exactly(fd, int.from_bytes(length, "little"))


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def _read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data
