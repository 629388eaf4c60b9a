"""Replicas in the router that a test feeds with real frames, and prompts whose block hashes are small numbers."""

from collections.abc import Iterable

from octavo_engine.wire.kv_stream import numbers, roll, run_together
from octavo_server.kv.frames import Hello, Part, ReplicaLoad, Snapshot, Step
from octavo_server.router.fleet.block_mirror import BlockMirror
from octavo_server.router.fleet.endpoint import Endpoint
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.prompts.prompt import Prompt

EPOCH = 7


class FedReplica:
    """`replica` is exact from the start; `publish_step` feeds it one frame."""

    def __init__(self, index: PrefixIndex, name: str, *, device: Iterable[int] = (), host: Iterable[int] = ()) -> None:
        self.replica = Replica(Endpoint(url=f"http://{name}", name=name))
        self._index = index
        self.connect(device=device, host=host)

    def connect(self, *, device: Iterable[int] = (), host: Iterable[int] = ()) -> None:
        self.blocks = self.replica.blocks = BlockMirror(self._index)
        self._digest = self._seq = 0
        part = Part(device=run_together(device), host=run_together(host))
        self._roll(device=part.device, host=part.host)
        load = ReplicaLoad(free_blocks=1000, total_blocks=1000)
        self.blocks.feed(
            Hello(
                version=1, epoch=EPOCH, block_size=16, root=bytes(32), max_model_len=8192, models=["m"], heartbeat_s=1.0
            )
        )
        self.blocks.feed(part)
        self.blocks.feed(Snapshot(epoch=EPOCH, seq=0, digest=self._digest, load=load))
        self.replica.load, self.replica.state = load, "exact"

    def publish_step(
        self,
        load: ReplicaLoad | None = None,
        *,
        stored: Iterable[int] = (),
        removed: Iterable[int] = (),
        coming: Iterable[int] = (),
    ) -> None:
        self.receive(self.step(load, stored=stored, removed=removed, coming=coming))

    def step(
        self,
        load: ReplicaLoad | None = None,
        *,
        stored: Iterable[int] = (),
        removed: Iterable[int] = (),
        coming: Iterable[int] = (),
    ) -> Step:
        """Return the next frame. The caller must pass it to `receive`."""
        new, old = run_together(stored), run_together(removed)
        self._roll(device=new)
        self._roll(device=old)
        self._seq += 1
        return Step(
            epoch=EPOCH, seq=self._seq, digest=self._digest, load=load or self.replica.load, stored=new, removed=old,
            coming=run_together(coming),
        )  # fmt: skip

    def receive(self, step: Step) -> None:
        self.blocks.feed(step)
        self.replica.load = step.load

    def lose(self) -> None:
        self.blocks.release()
        self.replica.blocks, self.replica.state = None, "blind"

    def _roll(self, *, device: bytes = b"", host: bytes = b"") -> None:
        self._digest = roll(roll(self._digest, "device", numbers(device)), "host", numbers(host))


def blind_replica(name: str) -> Replica:
    replica = Replica(Endpoint(url=f"http://{name}", name=name))
    replica.state = "blind"
    return replica


def prompt_of(hashes: Iterable[int], *, extra_tokens: int = 5, affinity: int = 1, **fields: int) -> Prompt:
    """Return a prompt of full blocks of 16 tokens and `extra_tokens` more."""
    known = tuple(hashes)
    num_tokens = 16 * len(known) + extra_tokens
    return Prompt(num_tokens=num_tokens, affinity=affinity, hashes=known, is_exact=bool(known), **fields)
