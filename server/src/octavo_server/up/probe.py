"""Polls the children of `octavo up`: whether a server is ready, and how many replicas the router has admitted."""

import asyncio
import re
from types import TracebackType

import aiohttp

PERIOD_S = 0.1
TIMEOUT_S = 5.0
_ADMITTED = re.compile(r"^octavo_router_endpoints_admitted (\d+)", re.MULTILINE)


class Probe:
    async def __aenter__(self) -> "Probe":
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def wait_ready(self, url: str, path: str) -> None:
        """Poll the path until its status is 200, without a time limit: the caller watches the process and cancels."""
        while (await self._get(url + path))[0] != 200:
            await asyncio.sleep(PERIOD_S)

    async def wait_admitted(self, router_url: str, num_replicas: int) -> None:
        while _num_admitted((await self._get(f"{router_url}/metrics"))[1]) < num_replicas:
            await asyncio.sleep(PERIOD_S)

    async def _get(self, url: str) -> tuple[int, str]:
        try:
            async with self._session.get(url) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""


def _num_admitted(metrics: str) -> int:
    match = _ADMITTED.search(metrics)
    return int(match[1]) if match else 0
