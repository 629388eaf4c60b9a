"""The pools of connections to all replicas, and the one clock that ends exchanges which have been silent for too long.

Our own and not a client library's, as what an exchange costs here is added to every answer (docs/router.md says how
much that is in all). Connections that have been idle for `KEEP_IDLE_S` are closed, before the replica does.
"""

import asyncio
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

from octavo_server.openai.errors import ReplicaLost, ReplicaTimeout
from octavo_server.router.upstream.connection import Connection, NotReached, StaleConnection, UpstreamResponse

KEEP_IDLE_S = 60.0
LOOK_EVERY_S = 0.1


class ConnectionPool:
    """One replica's connections. The latest that became idle is used first."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc.encode("ascii")
        self.active: set[Connection] = set()
        self.idle: list[Connection] = []
        self._address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s

    def begin(self, request: bytes, limit_s: float) -> UpstreamResponse | None:
        """None where that needs a new connection."""
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable:  # else it is about to be called lost
                return self._start(connection, request, limit_s)
        return None

    async def fetch(self, request: bytes, limit_s: float, begun: UpstreamResponse | None) -> UpstreamResponse:
        """The head of the answer is there. Raises ReplicaLost or ReplicaTimeout. `begun`: by `begin`."""
        if begun is not None:
            with suppress(StaleConnection):
                return await _answered(begun)
        return await _answered(self._start(await self._connect(), request, limit_s))

    def lost(self, begun_limit_s: float) -> None:
        """It doesn't answer any more: whoever has nothing yet needn't wait, and a begun answer only for so long."""
        for connection in [*self.active]:
            exchange = connection.exchange
            if exchange is not None and exchange.status:
                exchange.limit_s = min(exchange.limit_s, begun_limit_s)
            elif exchange is not None:
                exchange.fail(ReplicaLost("it doesn't answer any more"))

    def look(self, now: float) -> None:
        for connection in [*self.active]:
            exchange = connection.exchange
            if exchange is None:
                continue
            if exchange.is_held_up:
                exchange.heard_s = now
            elif now - exchange.heard_s > exchange.limit_s:
                exchange.fail(ReplicaTimeout(f"it has been silent for {exchange.limit_s:g} s"))
        for connection in [c for c in self.idle if now - c.idle_since_s > KEEP_IDLE_S]:
            self.idle.remove(connection)
            connection.transport.close()

    def close(self) -> None:
        for connection in (*self.idle, *self.active):
            connection.transport.abort()
        self.idle.clear()

    def _start(self, connection: Connection, request: bytes, limit_s: float) -> UpstreamResponse:
        self.active.add(connection)
        return connection.start(request, limit_s)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        host, port = self._address
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(self._new, host, port, ssl=self._tls)
        except TimeoutError:
            raise NotReached(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise NotReached(f"no connection: {error.strerror or error}") from None
        return connection

    def _new(self) -> Connection:
        return Connection(asyncio.get_running_loop(), on_idle=self._on_idle, on_lost=self._on_lost)

    def _on_idle(self, connection: Connection) -> None:
        self.active.discard(connection)
        connection.idle_since_s = connection.loop.time()
        self.idle.append(connection)

    def _on_lost(self, connection: Connection) -> None:
        self.active.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)


async def _answered(exchange: UpstreamResponse) -> UpstreamResponse:
    try:
        await exchange.begun()
    except BaseException:
        exchange.close()
        raise
    return exchange


class ConnectionPools:
    """Belongs to one event loop."""

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._origins: dict[str, ConnectionPool] = {}
        self._leaving: list[ConnectionPool] = []

    def origin(self, url: str) -> ConnectionPool:
        found = self._origins.get(url)
        if found is None:
            found = self._origins[url] = ConnectionPool(url, connect_timeout_s=self._connect_timeout_s)
        return found

    def forget(self, url: str) -> None:
        """Nothing new is sent there; what runs may end."""
        origin = self._origins.pop(url, None)
        if origin is not None:
            self._leaving.append(origin)

    async def watch(self) -> None:
        """Goes on until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for origin in (*self._origins.values(), *self._leaving):
                origin.look(loop.time())
            self._leave()

    def close(self) -> None:
        for origin in (*self._origins.values(), *self._leaving):
            origin.close()

    def _leave(self) -> None:
        for origin in self._leaving:
            for connection in origin.idle:
                connection.transport.close()
        self._leaving = [origin for origin in self._leaving if origin.active or origin.idle]
