"""Sends fuzzed requests to a server concurrently and collects the faults of its responses.

Faults are a status of 500 or more, an error without OpenAI's envelope, a truncated response, and no response in time.
A server may close the connection without a response only if the request wasn't HTTP.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from octavo_testing.fuzz_requests import FuzzRequest

ANSWER_TIMEOUT_S = 30
CONCURRENCY = 16
#: Seconds that a truncated request stays open, so that the server reads it.
PATIENCE_S = 0.1
#: uvicorn's response to bytes that aren't HTTP.
NOT_HTTP = b"Invalid HTTP request received."


@dataclass(slots=True)
class Report:
    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


async def send_all(url: str, requests: Iterable[FuzzRequest], report: Report) -> None:
    source = iter(requests)
    async with asyncio.TaskGroup() as senders:
        for _ in range(CONCURRENCY):
            senders.create_task(_send_from(source, url, report))


async def _send_from(source: Iterable[FuzzRequest], url: str, report: Report) -> None:
    for request in source:
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await _send(url, request)
        except TimeoutError:
            answer, fault = b"", "no answer in time"
        else:
            fault = "" if request.leaves != "never" else fault_of(answer, request)
        report.slowest_s = max(report.slowest_s, asyncio.get_running_loop().time() - started)
        report.kinds[request.kind] += 1
        report.statuses[_status(answer) if request.leaves == "never" else "left"] += 1
        if fault:
            report.faults.append(f"{fault}: {request.payload[:2000]!r} -> {answer[-1000:]!r}")


async def _send(url: str, request: FuzzRequest) -> bytes:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(request.payload)
        if request.leaves in ("within the body", "before the answer"):
            await writer.drain()
            return b""
        if request.leaves == "within the answer":
            return await reader.read(100)
        return await _read_answer(reader, writer, patience_s=PATIENCE_S if request.is_cut_off else ANSWER_TIMEOUT_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def _read_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, patience_s: float) -> bytes:
    """Read the response; after `patience_s` close the sending side, in case the server waits for more."""
    reading = asyncio.ensure_future(reader.read(-1))
    done, _ = await asyncio.wait({reading}, timeout=patience_s)
    if not done and writer.can_write_eof():
        writer.write_eof()
    return await reading


def fault_of(answer: bytes, request: FuzzRequest) -> str:
    """Return the fault of a response, or an empty string."""
    if not answer:
        return "" if request.is_cut_off else "no answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    status = _status(answer)
    if not status.isdigit():
        return "no status"
    if int(status) >= 500:
        return "server error"
    is_stream = b"text/event-stream" in head
    if is_stream and not _has_ended(body):
        return "a stream without its end"
    if int(status) >= 400 and not request.payload.startswith(b"HEAD") and not _is_envelope(body):
        return "an error without its envelope"
    return ""


def _has_ended(stream: bytes) -> bool:
    """Return whether the stream ends with `[DONE]` or with an event of the responses API or of Anthropic's."""
    *_, last = stream.removesuffix(b"0\r\n\r\n").rstrip(b"\r\n").split(b"\n\n")
    ends = (b"event: response.", b"event: message_stop", b"event: error")
    return last.endswith(b"data: [DONE]") or any(end in last for end in ends)


def _is_envelope(body: bytes) -> bool:
    if body == NOT_HTTP:
        return True
    try:
        answer = json.loads(body)
        is_anthropic = answer.get("type") == "error"
        return set(answer["error"]) == ({"message", "type"} if is_anthropic else {"message", "type", "param", "code"})
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _status(answer: bytes) -> str:
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "none"
