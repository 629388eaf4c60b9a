"""The interface of a routing policy: its input (`RouterView`, `PolicyRequest`) and its methods (`Policy`).

All policies get the same information at the same time: their own decisions at once, the first byte and the end of each
response when the router receives them, and each replica's frames. Policies that poll in reality get fresher figures
here.
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
    """A request in the router. `hashes` are those of its full blocks."""

    number: int
    text: bytes
    hashes: Sequence[int]
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """State of one router. Only the policy `PerfectKnowledge` may use `engines`."""

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
        """Return the tokens of the request that each replica's KV stream has reported as cached."""
        slots = [replica.blocks.slot for replica in self.replicas if replica.blocks is not None]
        found = self.index.match(request.hashes, slots)
        return [found[slot].device * BLOCK_SIZE if slot in found else 0 for slot in slots]


class Policy(Protocol):
    """`pick` returns a replica's number and counts the request as sent there."""

    def pick(self, request: PolicyRequest) -> int: ...

    def expected_tokens(self, number: int) -> int | None:
        """Return the cached tokens that a picked request should find; None if the policy doesn't predict them."""
        ...

    def on_frame(self, replica: int) -> None:
        """Handle a frame that the router has received from this replica."""
        ...

    def on_first_byte(self, request: PolicyRequest, replica: int, cached_tokens: int) -> None: ...

    def on_end(self, request: PolicyRequest, replica: int, *, ok: bool) -> None: ...
