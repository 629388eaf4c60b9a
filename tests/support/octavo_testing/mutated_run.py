"""Sends connections of mutated heads to a server concurrently and collects the faults of its responses."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo_testing.mutated_heads import MutatedConnection
from octavo_testing.raw_http import Answer, RawConnection, completion_body, request_bytes

CONCURRENCY = 32
#: Seconds to wait for the last response on a connection; an incomplete request takes all of them.
PATIENCE_S = 10.0
SEGMENT_PAUSE_S = 0.001
LAST = "last"
_last_request = request_bytes(completion_body(LAST), lines=[b"Connection: close"])


@dataclass(slots=True)
class MutatedReport:
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_unclosed: int = 0
    sent: set[str] = field(default_factory=set)


async def send_mutated(port: int, connections: Iterable[MutatedConnection], report: MutatedReport) -> None:
    source = iter(connections)
    async with asyncio.TaskGroup() as senders:
        for _ in range(CONCURRENCY):
            senders.create_task(_send_from(source, port, report))


async def _send_from(source: Iterator[MutatedConnection], port: int, report: MutatedReport) -> None:
    for sent in source:
        report.sent |= sent.prompts
        async with await RawConnection.open(port) as connection:
            await connection.send(*sent.segments, _last_request, pause_s=SEGMENT_PAUSE_S)
            answers = await connection.read_to_end(timeout_s=PATIENCE_S)
            report.statuses.update(answer.status for answer in answers)
            report.num_unclosed += not connection.is_closed
            fault = connection.fault or fault_of(answers, sent)
        if fault:
            report.faults.append(f"{fault}: {sent.segments!r} -> {answers!r}")


def fault_of(answers: list[Answer], sent: MutatedConnection) -> str:
    """Return the first fault of a connection's responses; an empty string if each belongs to one of its requests."""
    most = sent.most_answers + 1  # the last request's
    if len(answers) > most:
        return f"{len(answers)} answers to at most {most} requests"
    texts = [answer.text for answer in answers if answer.status == 200]
    found = [prompt for text in texts for prompt in (LAST, *sent.prompts) if text.startswith(prompt)]
    if len(found) != len(texts):
        return "an answer to a request that was not sent on this connection"
    if len(found) != len({*found}):
        return "two answers to one request"
    if found[: len(sent.needed)] != [*sent.needed]:
        return "a well-formed request was not served"
    if any(answer.status >= 500 for answer in answers):
        return "server error"
    return ""
