"""Replicas from a list: `--replica URL…`. The list never changes; the fleet finds out which of them answer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

from octavo_engine.wire.errors import StartupError

from octavo_server.router.fleet.endpoint import Endpoint


class StaticDiscovery:
    """Raises StartupError for a text that is no URL of a replica."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._endpoints = frozenset(endpoint_of(url) for url in urls)
        if len(self._endpoints) != len(urls):
            raise StartupError(
                "--replica: a replica is named twice; its requests would be counted twice. Give each URL once."
            )

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        yield self._endpoints
        await asyncio.Event().wait()


def endpoint_of(url: str) -> Endpoint:
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None  # raises ValueError for what is no port
    except ValueError as error:
        raise StartupError(f"--replica {url}: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise StartupError(f"--replica {url}: expected http://HOST:PORT, without a path or a query.")
    if "@" in parts.netloc:
        raise StartupError("--replica: a password in the address would be seen in logs: give the key by --replica-key.")
    name = parts.netloc if has_port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"
    return Endpoint(f"{parts.scheme}://{parts.netloc}", name)
