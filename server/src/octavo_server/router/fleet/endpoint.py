"""`Endpoint`: the address of a replica as discovery reports it, and the protocol of a discovery."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url`: scheme, host and port only. `name`: the pod's name, else host and port; unique among replicas.

    `is_ready`: None where discovery can't tell (a list, DNS). False for a pod that isn't ready yet: the router follows
    its KV stream and sends it no requests.
    """

    url: str
    name: str
    is_ready: bool | None = None


class Discovery(Protocol):
    def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield all endpoints at first and after each change. Errors are retried inside; only closing it ends it."""
        ...
