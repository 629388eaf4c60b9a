"""Connection pools to all replicas, and the periodic check that fails responses after too long a silence.

Octavo has its own HTTP client, as the client's cost is added to every request (figures: docs/internals/routing.md).
"""

import asyncio
import ssl
from urllib.parse import urlsplit

from octavo_server.openai.errors import ReplicaTimeout
from octavo_server.router.upstream.connection import Connection, NotReached, UpstreamResponse

#: vLLM's server closes a connection that was idle for 5 s; the router closes it before that.
KEEP_IDLE_S = 4.0
CHECK_EVERY_S = 0.1

FELL_SILENT = (
    "The replica stopped answering while it had the request. The request may be the cause, so it was not sent to "
    "another replica: send it again later, and a large one in parts."
)


class ConnectionPool:
    """Connections to one replica. The connection that became idle last is used first."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc.encode("ascii")
        self.active: set[Connection] = set()
        self.idle: list[Connection] = []
        self._address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s

    async def send(self, request: bytes, limit_s: float) -> UpstreamResponse:
        """Send a request and return when the response head has arrived. Raises ReplicaLost or ReplicaTimeout."""
        connection = self._pop_idle() or await self._connect()
        self.active.add(connection)
        response = connection.start(request, limit_s)
        try:
            await response.wait_headers()
        except BaseException:
            response.close()
            raise
        return response

    def check_silence(self, now: float) -> None:
        """Fail responses that are silent for longer than their limit, and close connections idle for `KEEP_IDLE_S`."""
        for connection in [*self.active]:
            response = connection.response
            if response is None:
                continue
            if response.is_paused:
                response.active_s = now
            elif now - response.active_s > response.limit_s:
                response.fail(ReplicaTimeout(f"it has been silent for {response.limit_s:g} s"))
        for connection in [c for c in self.idle if now - (c.idle_since_s or now) > KEEP_IDLE_S]:
            self.idle.remove(connection)
            connection.transport.close()

    def fail_waiting(self, *, begun_limit_s: float) -> None:
        """Fail responses that have not begun, and lower the silence limit of those that have: the replica is dead.

        The error is NotReached, after which a retry is safe, only if the replica can't have read the whole request.
        """
        for connection in [*self.active]:
            response = connection.response
            if response is not None and response.status:
                response.limit_s = min(response.limit_s, begun_limit_s)
            elif response is not None:
                is_delivered = connection.is_delivered
                response.fail(ReplicaTimeout(FELL_SILENT) if is_delivered else NotReached("it no longer answers"))

    def close_idle(self) -> None:
        for connection in self.idle:
            connection.transport.close()

    def close(self) -> None:
        for connection in (*self.idle, *self.active):
            connection.transport.abort()
        self.idle.clear()

    def _pop_idle(self) -> Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        host, port = self._address
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(self._new_connection, host, port, ssl=self._tls)
        except TimeoutError:
            raise NotReached(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            raise NotReached(f"no connection: {error.strerror or error}") from None
        return connection

    def _new_connection(self) -> Connection:
        return Connection(asyncio.get_running_loop(), on_idle=self._on_idle, on_lost=self._on_lost)

    def _on_idle(self, connection: Connection) -> None:
        self.active.discard(connection)
        connection.idle_since_s = connection.loop.time()
        self.idle.append(connection)

    def _on_lost(self, connection: Connection) -> None:
        self.active.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)


class ConnectionPools:
    """One pool for each replica. Belongs to one event loop."""

    def __init__(self, *, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._pools: dict[str, ConnectionPool] = {}
        self._retired: list[ConnectionPool] = []

    def pool(self, url: str) -> ConnectionPool:
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = ConnectionPool(url, connect_timeout_s=self._connect_timeout_s)
        return pool

    def retire(self, url: str) -> None:
        """Stop using the replica's pool, which closes when its running requests have ended."""
        pool = self._pools.pop(url, None)
        if pool is not None:
            self._retired.append(pool)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            for pool in (*self._pools.values(), *self._retired):
                pool.check_silence(loop.time())
            for pool in self._retired:
                pool.close_idle()
            self._retired = [pool for pool in self._retired if pool.active or pool.idle]

    def close(self) -> None:
        for pool in (*self._pools.values(), *self._retired):
            pool.close()
