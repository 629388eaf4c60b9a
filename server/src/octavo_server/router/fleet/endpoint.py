"""`Endpoint`: the address of a replica as discovery reports it. `Discovery`: the interface of all ways to discover."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from octavo_engine.wire.errors import StartupError

#: State of a replica in the router; replica.py describes the states.
State = Literal["connecting", "loading", "exact", "blind", "gone"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`url`: scheme, host and port only. `name`: the pod's name, else host and port; unique among replicas.

    `is_ready`: None where discovery doesn't report readiness (`--replica`, DNS). False for a pod that isn't ready yet:
    the router follows its KV stream and sends it no requests.
    """

    url: str
    name: str
    is_ready: bool | None = None


class Discovery(Protocol):
    def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield all endpoints at first and after each change. Errors are retried inside, so the iterator never ends."""
        ...


class StaticDiscovery:
    """A list that never changes: `--replica URL...`. Raises StartupError for an invalid URL."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._endpoints = frozenset(endpoint_of(url) for url in urls)
        if len(self._endpoints) != len(urls):
            raise StartupError(
                "--replica: a URL is given twice, so its requests would be counted twice. Give each URL once."
            )

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        yield self._endpoints
        await asyncio.Event().wait()


def endpoint_of(url: str) -> Endpoint:
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None  # raises ValueError for an invalid port
    except ValueError as error:
        raise StartupError(f"--replica {url}: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise StartupError(f"--replica {url}: expected http://HOST:PORT, without a path or a query.")
    if "@" in parts.netloc:
        raise StartupError("--replica: a password in the URL would appear in logs: give the key with --replica-key.")
    name = parts.netloc if has_port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"
    return Endpoint(f"{parts.scheme}://{parts.netloc}", name)
