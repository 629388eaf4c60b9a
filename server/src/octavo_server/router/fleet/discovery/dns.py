"""Replicas behind one DNS name, such as that of a headless Service: each address is a replica.

The name is resolved again at an interval. While the resolver fails, the last addresses stay. An empty answer
(no address, or no such name) counts only when it is the third in a row, as resolvers also send it by mistake.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

from octavo_engine.wire.errors import StartupError

from octavo_server.router.fleet.endpoint import Endpoint

logger = logging.getLogger(__name__)

LOOK_UP_S = 10.0
EMPTY_ANSWERS = 3
NOTHING = (socket.EAI_NONAME, socket.EAI_NODATA)

#: Resolves a name and a port to addresses. Raises gaierror.
Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]


class DnsDiscovery:
    """`service`: HOST:PORT or a URL. Raises StartupError for any other text."""

    def __init__(self, service: str, *, interval_s: float, resolve: Resolve = resolve) -> None:
        self._scheme, self._host, self._port = _parsed(service)
        self._interval_s = interval_s
        self._resolve = resolve
        self._num_empty = 0

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        latest: frozenset[Endpoint] | None = None
        while True:
            addresses = await self._look_up()
            if addresses is not None and addresses != latest:
                logger.info("the name %s resolves to %d addresses, each a replica", self._host, len(addresses))
                latest = addresses
                yield addresses
            await asyncio.sleep(self._interval_s)

    async def _look_up(self) -> frozenset[Endpoint] | None:
        """Resolve the name. Return the endpoints, or None to keep the previous ones."""
        try:
            async with asyncio.timeout(LOOK_UP_S):
                addresses = await self._resolve(self._host, self._port)
        except socket.gaierror as error:
            if error.errno not in NOTHING:
                logger.warning("cannot resolve %s: %s; its replicas stay unchanged", self._host, error.strerror)
                return None
            addresses = []
        except (TimeoutError, OSError) as error:
            logger.warning("cannot resolve %s: %s; its replicas stay unchanged", self._host, error or "no answer")
            return None
        self._num_empty = 0 if addresses else self._num_empty + 1
        if 0 < self._num_empty < EMPTY_ANSWERS:
            return None
        return frozenset(endpoint_at(self._scheme, address, self._port) for address in addresses)


def endpoint_at(scheme: str, address: str, port: int, *, name: str = "", is_ready: bool | None = None) -> Endpoint:
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return Endpoint(f"{scheme}://{place}", name or place, is_ready)


def _parsed(service: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(service if "://" in service else f"http://{service}")
        port = parts.port
    except ValueError as error:
        raise StartupError(f"--service {service}: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or parts.path.strip("/"):
        raise StartupError(f"--service {service}: expected HOST:PORT, or http://HOST:PORT.")
    return parts.scheme, parts.hostname, port
