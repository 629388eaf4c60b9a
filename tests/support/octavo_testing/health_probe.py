"""Measures how long a server's event loop is blocked: the slowest of regular `/health` requests over one connection."""

import asyncio
import time
from contextlib import suppress
from typing import Self

PROBE_EVERY_S = 0.005
ANSWER_TIMEOUT_S = 60.0
_PROBE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class HealthProbe:
    """Probes inside `async with`. `longest_s` is the slowest response; the caller must not block its own event loop."""

    def __init__(self, port: int) -> None:
        self.longest_s = 0.0
        self._port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await self._probe()
        except BaseException:
            await self._close()
            raise
        self.longest_s, self._is_over = 0.0, False
        self._probing = asyncio.create_task(self._probe_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the pending response, then stop."""
        self._is_over = True
        try:
            await self._probing
        finally:
            await self._close()

    async def _close(self) -> None:
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _probe_on(self) -> None:
        while not self._is_over:
            await asyncio.sleep(PROBE_EVERY_S)
            await self._probe()

    async def _probe(self) -> None:
        started = time.monotonic()
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            self._writer.write(_PROBE)
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            (length,) = (int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
            await self._reader.readexactly(length)
        self.longest_s = max(self.longest_s, time.monotonic() - started)
