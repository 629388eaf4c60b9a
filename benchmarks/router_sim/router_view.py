"""What a routing policy sees (`RouterView`, `PolicyRequest`) and what it has to answer (`Policy`).

All policies hear of the same things at the same time: their own decisions at once, a first byte and an end when they
come by, and each replica's frames. Those that poll in reality get fresher numbers here than there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.fleet.replica import Replica

from router_sim.engine import SimEngine
from router_sim.hardware import Hardware

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """A request as a router has it: `hashes` are those of its full blocks."""

    number: int
    text: bytes
    hashes: Sequence[int]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """`engines` is for the one policy that may see everything."""

    clock: Callable[[], float]
    rng: Random
    hardware: Hardware
    index: PrefixIndex
    replicas: list[Replica]
    engines: list[SimEngine]

    @property
    def size(self) -> int:
        return len(self.replicas)

    def matched_tokens(self, request: PolicyRequest) -> list[int]:
        """Of each replica, as the streams told."""
        slots = [replica.blocks.slot for replica in self.replicas if replica.blocks is not None]
        found = self.index.match(request.hashes, slots)
        return [found[slot].device * BLOCK_SIZE if slot in found else 0 for slot in slots]


class Policy(Protocol):
    """`pick` answers with a replica's number, and counts the request as sent there."""

    def pick(self, request: PolicyRequest) -> int: ...

    def expected_tokens(self, number: int) -> int | None:
        """That a request just picked for is to find in the cache; None from those that don't say."""
        ...

    def on_frame(self, replica: int) -> None:
        """A frame of that replica has been taken in."""
        ...

    def on_first_byte(self, request: PolicyRequest, replica: int, cached_tokens: int) -> None: ...

    def on_end(self, request: PolicyRequest, replica: int, *, ok: bool) -> None: ...
