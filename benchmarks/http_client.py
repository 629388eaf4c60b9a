"""The load generator of `http_overhead.py`: a separate process on raw sockets, which take little CPU time.

`streams` sends many chats at once. `alone` sends chats one by one to an idle server, each between two readings of
`/metrics`; their difference is the engine's own time to the first token. The output is one line of JSON.
"""

import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass

WORDS = ("paper", "page", "read", "book", "leaf", "price", "ink", "press", "type", "letter", "margin", "spine")
DONE = b"data: [DONE]\n\n"
ENGINE_SUMS = ("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum")


@dataclass(frozen=True, slots=True)
class Answer:
    first_s: float
    num_tokens: int
    num_chunks: int


class Connection:
    """One keep-alive connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    async def chat(self, words: str, max_tokens: int) -> Answer:
        """Send a streamed chat. Every chunk but the first (the role) and the last (the usage) holds text."""
        body = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        await self._ask("POST", "/v1/chat/completions", json.dumps(body).encode())
        data = await self._reader.read(1 << 16)
        first_s = time.perf_counter() - started
        while DONE not in data[-len(DONE) - 16 :]:
            data += await self._reader.read(1 << 16)
        if not data.endswith(b"0\r\n\r\n"):
            await self._reader.readuntil(b"0\r\n\r\n")
        usage = json.loads(data.rsplit(b"data: ", 2)[1].partition(b"\n")[0])["usage"]
        return Answer(first_s, usage["completion_tokens"], data.count(b"data: {") - 2)

    async def engine_seconds(self) -> float:
        """Return the seconds that all requests so far spent in the engine before their first token."""
        head = await self._ask("GET", "/metrics", b"")
        length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if b"content-length" in line)
        text = (await self._reader.readexactly(length)).decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(ENGINE_SUMS))

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def _ask(self, method: str, path: str, body: bytes) -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        self._writer.write(head.encode() + b"\r\n" + body)
        answered = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answered.split(b"\r\n", 1)[0]:
            raise RuntimeError((answered + await self._reader.read(4096)).decode())
        return answered


def words(count: int, seed: int) -> str:
    """Return words that begin with the seed, so that prompts share no prefix beyond the template's."""
    return f"{seed} " + " ".join(random.Random(seed).choices(WORDS, k=count))


async def streams(port: int, *, count: int, max_tokens: int, seed: int) -> dict[str, object]:
    connections = [await Connection.open(port) for _ in range(count)]
    cpu_s, started = _cpu_seconds(), time.perf_counter()
    answers = await asyncio.gather(*(c.chat(words(64, seed + i), max_tokens) for i, c in enumerate(connections)))
    wall_s, cpu_s = time.perf_counter() - started, _cpu_seconds() - cpu_s
    for connection in connections:
        await connection.close()
    totals = {"tokens": sum(a.num_tokens for a in answers), "chunks": sum(a.num_chunks for a in answers)}
    return {**totals, "cpu_s": cpu_s, "wall_s": wall_s, "answers": [asdict(a) for a in answers]}


async def alone(port: int, *, count: int, max_tokens: int, seed: int) -> dict[str, object]:
    connection = await Connection.open(port)
    http_s, engine_s = [], []
    for i in range(count):
        before = await connection.engine_seconds()
        http_s.append((await connection.chat(words(128, seed + i), max_tokens)).first_s)
        engine_s.append(await connection.engine_seconds() - before)
    await connection.close()
    return {"http_s": http_s, "engine_s": engine_s}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    kind, port, count, max_tokens, seed = sys.argv[1], *map(int, sys.argv[2:])
    run = streams if kind == "streams" else alone
    print(json.dumps(asyncio.run(run(port, count=count, max_tokens=max_tokens, seed=seed))))


if __name__ == "__main__":
    main()
