"""`BlockMirror`: a copy of one replica's blocks in the prefix index, fed with the frames of one KV stream connection.

States: loading (the snapshot isn't complete), exact (every change so far is in the index, and the digests agree),
broken (final). Only an exact mirror may be used to choose a replica. A broken mirror releases its slot at once; the
next connection gets a new `BlockMirror` and a new slot, as no entry of the old copy can be trusted.
"""

from typing import Literal

from octavo_engine.wire.kv_stream import numbers, roll

from octavo_server.kv.frames import VERSION, Bye, Frame, Hello, Part, ReplicaLoad, Snapshot, Step
from octavo_server.router.fleet.prefix_index import DEVICE, HOST, PrefixIndex, Slot

State = Literal["loading", "exact", "broken"]


class StreamBroken(Exception):
    """The mirror may differ from the replica's blocks from now on; the message is the reason."""


class BlockMirror:
    def __init__(self, index: PrefixIndex) -> None:
        self.state: State = "loading"
        self.slot: Slot = index.acquire_slot()
        self.hello: Hello | None = None
        self.load = ReplicaLoad()
        self.num_blocks = 0  # number of blocks on the device
        self.coming: tuple[int, ...] = ()  # blocks in the latest frame that a request which just arrived will store
        self._index = index
        self._digest = 0
        self._seq = 0

    def feed(self, frame: Frame) -> None:
        """Apply a frame to the index. Raises StreamBroken, after which no frame may be fed."""
        assert self.state != "broken", "a frame was fed to a broken mirror"
        try:
            self._apply_frame(frame)
        except (StreamBroken, ValueError) as error:
            self.release()
            raise StreamBroken(str(error)) from None

    def release(self) -> None:
        """Release the slot, and set the state to broken: the connection ended, or a frame was invalid."""
        if self.state != "broken":
            self.state = "broken"
            self._index.release_slot(self.slot)

    def _apply_frame(self, frame: Frame) -> None:
        match frame:
            case Hello():
                self._check_hello(frame)
            case Bye():
                raise StreamBroken(f"the replica ended its KV stream: {frame.reason}.")
            case _ if self.hello is None:
                raise StreamBroken(f"a {type(frame).__name__} frame arrived before the hello frame.")
            case Part():
                self._require_state("loading", frame)
                self._store(frame.device, frame.host)
            case Snapshot():
                self._require_state("loading", frame)
                self._finish_loading(frame)
            case Step():
                self._require_state("exact", frame)
                self._apply_step(frame)

    def _check_hello(self, hello: Hello) -> None:
        if self.hello is not None:
            raise StreamBroken("a second hello frame arrived.")
        if hello.version != VERSION:
            raise StreamBroken(f"its KV stream has version {hello.version}; this router reads version {VERSION}.")
        self.hello = hello

    def _require_state(self, state: State, frame: Frame) -> None:
        if self.state != state:
            raise StreamBroken(f"a {type(frame).__name__} frame arrived in the state {self.state}.")

    def _finish_loading(self, frame: Snapshot) -> None:
        self._check_digest(frame)
        self._seq, self.load, self.state = frame.seq, frame.load, "exact"

    def _apply_step(self, frame: Step) -> None:
        self.coming = ()
        if frame.seq != self._seq:
            if frame.seq != self._seq + 1:
                raise StreamBroken(f"frame {frame.seq} arrived after frame {self._seq}.")
            self._apply_changes(frame)
            self._seq = frame.seq
            self.coming = numbers(frame.coming) if frame.coming else ()
        self._check_digest(frame)
        self.load = frame.load

    def _apply_changes(self, frame: Step) -> None:
        self._store(frame.stored, frame.host_stored)
        gone, gone_from_host = numbers(frame.removed), numbers(frame.host_removed)
        self._index.remove(self.slot, gone, DEVICE)
        self._index.remove(self.slot, gone_from_host, HOST)
        self.num_blocks -= len(gone)
        self._digest = roll(roll(self._digest, "device", gone), "host", gone_from_host)

    def _store(self, device: bytes, host: bytes) -> None:
        on_device, on_host = numbers(device), numbers(host)
        self._index.store(self.slot, on_device, DEVICE)
        self._index.store(self.slot, on_host, HOST)
        self.num_blocks += len(on_device)
        self._digest = roll(roll(self._digest, "device", on_device), "host", on_host)

    def _check_digest(self, frame: Snapshot | Step) -> None:
        assert self.hello is not None
        if frame.epoch != self.hello.epoch:
            raise StreamBroken("the frame has another epoch: the engine was restarted.")
        if frame.digest != self._digest:
            raise StreamBroken(f"after frame {frame.seq} the digest is {self._digest:016x}, not {frame.digest:016x}.")
