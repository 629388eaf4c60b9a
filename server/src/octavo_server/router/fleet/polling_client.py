"""`PollingClient` sends GET requests to one replica: `/kv/events`, `/health`, and for a polled replica `/v1/models` and
`/metrics`.

A polled replica has no KV stream: plain vLLM, or Octavo with `--no-kv-stream`. Its model names come from `/v1/models`,
its load from the Prometheus text of `/metrics` (vLLM's metric names, which Octavo has too).
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from math import isfinite
from typing import Any, NamedTuple

import aiohttp
import msgspec

from octavo_server.kv.frames import ReplicaLoad

MAX_ANSWER_BYTES = 4 * 1024 * 1024

#: Connection errors when a host has vanished. A refused connection isn't one of them: the host has answered.
UNREACHABLE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


class _Model(msgspec.Struct):
    """An entry of `/v1/models`. `max_model_len`, `parent`: any JSON value or missing, as servers differ."""

    id: str
    max_model_len: Any = None
    parent: Any = None


class _Models(msgspec.Struct):
    data: list[_Model]


class PolledModels(NamedTuple):
    """`lengths`: name of a model or adapter -> longest request in tokens, None where the server doesn't report it.
    `adapters`: those names that have a parent.
    """

    lengths: dict[str, int | None]
    adapters: frozenset[str]


_read_models = msgspec.json.Decoder(_Models).decode


class PollingClient:
    """`num_unanswered`: requests in a row without a response. Refused connections neither count nor end the row."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Callable[[], Mapping[str, str]]) -> None:
        self._session = session
        self._url = url
        self._headers = headers
        self.num_unanswered = 0

    @asynccontextmanager
    async def open(self, path: str, timeout_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response when its head has arrived. Leaving the context closes the connection without waiting."""
        try:
            async with asyncio.timeout(timeout_s):
                # A redirect would send the secret to another server.
                response = await self._session.get(self._url + path, headers=self._headers(), allow_redirects=False)
        except TimeoutError:
            self.num_unanswered += 1
            raise
        except aiohttp.ClientConnectorError as error:
            self.num_unanswered += error.os_error.errno in UNREACHABLE
            raise
        self.num_unanswered = 0
        try:
            yield response
        finally:
            response.close()

    async def models(self, timeout_s: float) -> PolledModels:
        """Read `/v1/models`. Raises ClientError, also for a response that is no list of models."""
        body = await self._read("/v1/models", timeout_s)
        try:
            models = _read_models(body).data
        except (msgspec.MsgspecError, RecursionError) as error:
            raise aiohttp.ClientPayloadError(f"/v1/models is invalid: {error}") from None
        lengths = {model.id: _length(model.max_model_len) for model in models}
        return PolledModels(lengths, frozenset(model.id for model in models if isinstance(model.parent, str)))

    async def load(self, timeout_s: float) -> ReplicaLoad:
        try:
            text = (await self._read("/metrics", timeout_s)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError):
            return ReplicaLoad()
        return load_of(text)

    async def _read(self, path: str, timeout_s: float) -> bytes:
        async with self.open(path, timeout_s) as response, asyncio.timeout(timeout_s):
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{path} answered {response.status}")
            body = b""
            while len(body) <= MAX_ANSWER_BYTES and (more := await response.content.readany()):
                body += more
        if len(body) > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
        return body


def _length(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def load_of(text: str) -> ReplicaLoad:
    """Sum vLLM's metrics of running and of waiting requests in Prometheus text, each over all its samples."""
    sums = {RUNNING: 0.0, WAITING: 0.0}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in sums:
            try:
                sums[name] += float(line.rpartition("}")[2].split()[0 if "}" in line else 1])
            except (IndexError, ValueError):
                continue
    running, waiting = (int(value) if isfinite(value) else 0 for value in sums.values())
    return ReplicaLoad(running=running, waiting=waiting)
