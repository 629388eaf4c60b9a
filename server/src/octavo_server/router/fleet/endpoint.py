"""`Endpoint`: where a replica answers, as discovery knows it, and the small seam to whatever discovers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url`: scheme, host and port, nothing behind. `name`: the pod's, else host and port; unique among replicas.

    `is_ready`: None where discovery has no opinion (a list, DNS); False for a pod that isn't ready yet, which is
    followed, not sent to.
    """

    url: str
    name: str
    is_ready: bool | None = None


class Discovery(Protocol):
    def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """All endpoints, at once and again whenever they change; goes on until it is closed, whatever fails."""
        ...
