"""What changed in the KV cache since somebody last asked: the seam of the KV stream.

The pools report a hash when its first copy in a tier appears and when its last one goes. Only the net change is kept
(stored and removed again cancel out), so an undrained record never grows beyond the blocks there are, before and now.
"""

from dataclasses import dataclass, field
from typing import Literal

Tier = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class KVDelta:
    stored: list[tuple[Tier, bytes]] = field(default_factory=list)
    removed: list[tuple[Tier, bytes]] = field(default_factory=list)


class KVDeltas:
    __slots__ = ("_net", "enabled")

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._net: dict[tuple[Tier, bytes], bool] = {}

    def stored(self, tier: Tier, block_hash: bytes) -> None:
        if self.enabled:
            self._record((tier, block_hash), now_there=True)

    def removed(self, tier: Tier, block_hash: bytes) -> None:
        if self.enabled:
            self._record((tier, block_hash), now_there=False)

    def drain(self) -> KVDelta:
        net, self._net = self._net, {}
        return KVDelta([key for key, there in net.items() if there], [key for key, there in net.items() if not there])

    def _record(self, key: tuple[Tier, bytes], *, now_there: bool) -> None:
        before = self._net.pop(key, None)
        assert before is not now_there, f"{key} reported twice"
        if before is None:
            self._net[key] = now_there
