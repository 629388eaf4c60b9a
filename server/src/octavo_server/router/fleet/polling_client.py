"""What can be learned of a server by asking it, where no KV stream tells: plain vLLM, or Octavo with `--no-kv-stream`.

Its names come from `/v1/models`, its load from the Prometheus text of `/metrics` (vLLM's names, which Octavo has too).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from math import isfinite
from typing import Any

import aiohttp
import msgspec

from octavo_server.kv.frames import Load

MAX_ANSWER_BYTES = 4 * 1024 * 1024

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


class _Model(msgspec.Struct):
    """`max_model_len`: whatever a server says there, if it says anything."""

    id: str
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[_Model]


_read_models = msgspec.json.Decoder(_Models).decode


class PollingClient:
    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Callable[[], Mapping[str, str]]) -> None:
        self._session = session
        self._url = url
        self._headers = headers

    @asynccontextmanager
    async def open(self, path: str, timeout_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of the answer, in time. Its end waits for nothing: what follows from it is decided at once."""
        async with asyncio.timeout(timeout_s):
            # A redirect would take the secret elsewhere.
            response = await self._session.get(self._url + path, headers=self._headers(), allow_redirects=False)
        try:
            yield response
        finally:
            response.close()

    async def models(self, timeout_s: float) -> dict[str, int | None]:
        """Name -> longest request in tokens, None where that isn't told. Raises ClientError, also for an answer that
        isn't one."""
        body = await self._read("/v1/models", timeout_s)
        try:
            return {model.id: _length(model.max_model_len) for model in _read_models(body).data}
        except msgspec.MsgspecError as error:
            raise aiohttp.ClientPayloadError(f"/v1/models: {error}") from None

    async def load(self, timeout_s: float) -> Load:
        """As far as `/metrics` tells; nothing if there is none."""
        try:
            text = (await self._read("/metrics", timeout_s)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError):
            return Load()
        return load_of(text)

    async def _read(self, path: str, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s), self.open(path, timeout_s) as response:
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{path} answered {response.status}")
            body = b""
            while len(body) <= MAX_ANSWER_BYTES and (more := await response.content.readany()):
                body += more
        if len(body) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"{path}: more than {MAX_ANSWER_BYTES} bytes")
        return body


def _length(told: Any) -> int | None:
    return told if type(told) is int and told > 0 else None


def load_of(text: str) -> Load:
    """What isn't a sample of these metrics is passed over."""
    sums = {RUNNING: 0.0, WAITING: 0.0}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in sums:
            try:
                sums[name] += float(line.rpartition("}")[2].split()[0 if "}" in line else 1])
            except (IndexError, ValueError):
                continue
    running, waiting = (int(value) if isfinite(value) else 0 for value in sums.values())
    return Load(running=running, waiting=waiting)
