"""Messages between rank 0 of a model, which is in the engine core, and the process of another rank.

The rank reads `RankStart` from its standard input, and then messages (msgpack) from an ipc socket, in this order:
`LoadPart`; plans, and calls between them; `Leave`. On its standard output, it reports `RankHello` once it can load,
then `RankReady`, an `Answer` to each call, and at last `Failed` or `Left`. While ranks connect to each other, `Entry`
goes in both directions: after the rank's `LoadPart`, and sometimes after its `RankReady`, if other ranks are slower.

Ranks on other hosts get and send the same messages, wrapped in `Pass` and `Reported`, over their host's connection. A
host first sends `HostHello`. The first host answers `HostRefused`, or sends `FindFiles` (the host answers `Found`),
`StartRank` and `LoadRank` for each of the host's ranks, `Serving` once all ranks are ready, and at the end `Goodbye`,
for which a host can ask with `Drain`.
"""

from pathlib import Path
from typing import Any

import msgspec

from octavo_engine.devices.memory import HostMemory
from octavo_engine.log_format import LogFormat
from octavo_engine.process.messages import Failed
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.adapter import AdapterFiles
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.wire.plan import StepPlan
from octavo_engine.wire.sleep import MemoryTag


class RankStart(msgspec.Struct, kw_only=True):
    """Starts a rank's process. `config`: settings of its host. `folder`: the folder that has the rank's socket."""

    rank: int
    config: EngineConfig
    folder: str
    parent_pid: int
    log_format: LogFormat


class RankHello(msgspec.Struct, tag=True):
    """The rank can load. `memory`: its host's memory, reported by the first rank of each host but the first."""

    memory: HostMemory | None = None


class LoadPart(msgspec.Struct, tag=True, kw_only=True):
    """A `RankPart` with its settings. `config`, `host`, `num_layers`: from `RankPlans`. `address`: the host's address,
    to which other ranks connect. `divides_threads`: the rank divides `num_threads` by its host's number of ranks."""

    rank: int
    config: EngineConfig
    files: ModelFiles
    host: HostMemory
    num_blocks: int
    num_host_blocks: int
    num_layers: tuple[int, ...]
    address: str
    divides_threads: bool = False


class Entry(msgspec.Struct, tag=True):
    """An entry of a rank's `MessageStore`, which rank 0 sends to all others."""

    key: str
    value: bytes


class RankReady(msgspec.Struct, tag=True):
    weights_bytes: int


class RunPlan(msgspec.Struct, tag=True):
    plan: StepPlan


class Release(msgspec.Struct, tag=True):
    tag: MemoryTag


class Restore(msgspec.Struct, tag=True):
    tag: MemoryTag


class AddAdapter(msgspec.Struct, tag=True):
    """Add an adapter that rank 0 has read. `tensors`: their bytes, by name. `adapter`: its hash."""

    files: AdapterFiles
    tensors: dict[str, bytearray]
    adapter: str


class RemoveAdapter(msgspec.Struct, tag=True):
    adapter: str


class Leave(msgspec.Struct, tag=True):
    """Another rank is gone or late: end."""


class Answer(msgspec.Struct, tag=True):
    """A call is done. `error`: why the call changed nothing, in words for the user; None without an error."""

    error: str | None = None


class Left(msgspec.Struct, tag=True):
    """The rank ends because another one is gone or late."""


Call = Release | Restore | AddAdapter | RemoveAdapter
ToRank = LoadPart | RunPlan | Call | Entry | Leave
FromRank = RankHello | Entry | RankReady | Answer | Failed | Left


class HostHello(msgspec.Struct, tag=True):
    """`address`: this host's address on its route to the first host. `settings`: the version, and the settings that
    must be equal on all hosts."""

    node_rank: int
    address: str
    settings: dict[str, Any]


class HostRefused(msgspec.Struct, tag=True):
    """The host cannot join, and ends. `reason`: one line."""

    reason: str


class FindFiles(msgspec.Struct, tag=True):
    """Find or download the model and the configured adapters. `revision`: the revision of `model` on the first host, or
    empty. `adapters`: location and revision on the first host, by name."""

    model: str
    revision: str
    adapters: dict[str, tuple[str, str]] = {}


class Found(msgspec.Struct, tag=True):
    """The host has its files. `fingerprints`: of the weights and of each adapter; see `named_fingerprints`."""

    fingerprints: dict[str, str]


class StartRank(msgspec.Struct, tag=True):
    """Start the process of a rank."""

    rank: int


class LoadRank(msgspec.Struct, tag=True):
    """Let a rank load its part, after the host has replaced files, adapters and threads by its own."""

    part: LoadPart


class Pass(msgspec.Struct, tag=True):
    """Send a message, already encoded, to a rank."""

    rank: int
    message: bytes


class Kill(msgspec.Struct, tag=True):
    """Kill a rank that is late."""

    rank: int


class Serving(msgspec.Struct, tag=True):
    """The engine is ready for requests."""


class Drain(msgspec.Struct, tag=True):
    """The host is to end: the engine may finish its requests before."""


class Goodbye(msgspec.Struct, tag=True):
    """The engine has ended. `reason`: None if it was stopped."""

    reason: str | None


class Reported(msgspec.Struct, tag=True):
    """A report of a rank; None: its process has ended."""

    rank: int
    report: FromRank | None


class HostFailed(msgspec.Struct, tag=True):
    """The host cannot start its ranks, and ends. `message`: one line."""

    message: str


ToHost = HostRefused | FindFiles | StartRank | LoadRank | Pass | Kill | Serving | Goodbye
FromHost = HostHello | Found | Reported | Drain | HostFailed


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} is in no message")


def _decode_path(kind: type, value: Any) -> Any:
    return kind(value)


encode = msgspec.msgpack.Encoder(enc_hook=_encode_path).encode
decode_start = msgspec.msgpack.Decoder(RankStart, dec_hook=_decode_path).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost, dec_hook=_decode_path).decode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=_decode_path).decode


def describe_unknown(error: msgspec.DecodeError) -> str:
    return f"it sends messages of another version ({error}): run the same version of Octavo on all hosts."


def inbox_address(folder: str, rank: int) -> str:
    return f"ipc://{Path(folder) / f'rank-{rank}'}"
