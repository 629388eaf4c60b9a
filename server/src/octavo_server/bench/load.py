"""Sends the requests of a benchmark when they are due and records when each chunk of their responses arrives."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from octavo_server.bench.samples import Sample
from octavo_server.client.api import ApiClient, ApiFailure
from octavo_server.client.chunks import Chunk


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times of one request in seconds; `start_s` is a `time.perf_counter` value. `itls_s`: gaps between its chunks with
    content."""

    prompt_tokens: int
    start_s: float = 0.0
    queue_s: float = 0.0  # delay before sending, due to --max-concurrency
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot_s(self) -> float:
        """Mean seconds per output token after the first token; 0 for fewer than two tokens."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """Path of the requests, and the fields that all requests share."""

    path: str
    model: str
    uses_chat: bool
    ignore_eos: bool
    extra_body: Mapping[str, Any]
    request_id_prefix: str = ""

    def body(self, sample: Sample) -> dict[str, Any]:
        common = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        end = {"ignore_eos": True} if self.ignore_eos else {}
        if self.uses_chat:
            messages = [{"role": "user", "content": sample.prompt}]
            return {
                **common,
                "messages": messages,
                "max_completion_tokens": sample.output_len,
                **end,
                **self.extra_body,
            }
        return {**common, "prompt": sample.prompt, "max_tokens": sample.output_len, **end, **self.extra_body}


#: Called with the number of requests finished and the number of chunks received since the last call.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Records of all requests of a run. `cpu_s`: CPU seconds that this process, the client, has used."""

    records: list[RequestRecord]
    duration_s: float
    cpu_s: float


async def run_load(
    api: ApiClient,
    target: BenchTarget,
    samples: Sequence[Sample],
    offsets_s: Sequence[float],
    *,
    max_concurrency: int | None,
    on_progress: OnProgress,
) -> LoadResult:
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    started_s, cpu_s = time.perf_counter(), time.process_time()

    async def send_one(position: int, due_s: float) -> RequestRecord:
        async with gate:
            record = await _request(api, target, samples[position], position, on_progress)
        record.queue_s = max(0.0, record.start_s - due_s)
        return record

    tasks = []
    async with asyncio.TaskGroup() as group:
        for position, offset_s in enumerate(offsets_s):
            due_s = started_s + offset_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(send_one(position, due_s)))
    return LoadResult(
        records=[task.result() for task in tasks],
        duration_s=time.perf_counter() - started_s,
        cpu_s=time.process_time() - cpu_s,
    )


async def _request(
    api: ApiClient, target: BenchTarget, sample: Sample, position: int, on_progress: OnProgress
) -> RequestRecord:
    record = RequestRecord(prompt_tokens=sample.prompt_len, start_s=time.perf_counter())
    headers = {"X-Request-Id": f"{target.request_id_prefix}{position}"} if target.request_id_prefix else None
    latest_s = 0.0
    try:
        async with aclosing(api.stream(target.path, target.body(sample), headers)) as chunks:
            async for chunk in chunks:
                now = time.perf_counter()
                if chunk.has_content:
                    if latest_s:
                        record.itls_s.append(now - latest_s)
                    else:
                        record.ttft_s = now - record.start_s
                    latest_s = now
                    record.text += chunk.text
                    on_progress(0, 1)
                _note_usage(record, chunk)
                if chunk.choices:
                    record.latency_s = now - record.start_s
    except ApiFailure as error:
        record.error = str(error)
    _complete(record)
    on_progress(1, 0)
    return record


def _note_usage(record: RequestRecord, chunk: Chunk) -> None:
    if chunk.usage is not None:
        record.prompt_tokens = chunk.usage.prompt_tokens or record.prompt_tokens
        record.output_tokens = chunk.usage.completion_tokens or record.output_tokens


def _complete(record: RequestRecord) -> None:
    """Fill in missing values: the number of chunks for that of tokens if the server sent none, and the time of the end
    for the time to first token if the answer has no text."""
    record.output_tokens = record.output_tokens or (len(record.itls_s) + 1 if record.ttft_s else 0)
    record.ttft_s = record.ttft_s or record.latency_s
    if record.error is None and not record.latency_s:
        record.error = "the answer was empty"
