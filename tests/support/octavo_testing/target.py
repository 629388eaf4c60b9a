"""`Target`: a server process under test with the official client, raw HTTP and its metrics."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from openai import OpenAI

from octavo_testing.serve_command import ServeProcess
from octavo_testing.server import parse_metrics

REAL_MODEL = "smollm2"
SETTLING_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    openai: OpenAI
    http: httpx.Client
    process: ServeProcess

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.http.get("/metrics").text)

    def metrics_when(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Return the first metrics that fulfil `holds`: the server counts some events shortly after a response."""
        deadline = time.monotonic() + SETTLING_TIMEOUT_S
        while not holds(metrics := self.metrics()):
            assert time.monotonic() < deadline, metrics
        return metrics


@contextmanager
def target(process: ServeProcess, key: str = "none") -> Iterator[Target]:
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=process.url, headers=headers, timeout=240) as http,
        OpenAI(base_url=f"{process.url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield Target(url=process.url, openai=client, http=http, process=process)
