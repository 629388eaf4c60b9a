"""Load generator of `router_replicas.py`: it sends a workload, records each request, and computes an oracle's hits.

The oracle has one unlimited cache for all replicas and has computed each request before the next one arrives: no policy
can find more. Its hits are computed after the run from the sent requests; their tokens come from a replica's render
endpoint, not from the router.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from replica_workloads import MAX_TOKENS, Turn
from tqdm import tqdm

BLOCK_SIZE = 16
REQUEST_TIMEOUT_S = 300.0
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Record:
    """`ttft_s` counts from the due time of the request, or from the end of the turn before if that was later."""

    messages: Messages
    ttft_s: float = 0.0
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`took_s`: seconds from the start of the run to the end of the last response."""

    records: list[Record] = field(repr=False)
    took_s: float

    @property
    def finished(self) -> list[Record]:
        return [record for record in self.records if not record.error]

    @property
    def num_errors(self) -> int:
        return len(self.records) - len(self.finished)

    @property
    def cached_tokens(self) -> int:
        return sum(record.cached_tokens for record in self.finished)

    @property
    def computed_blocks(self) -> int:
        """Approximate number of full blocks that were computed; the last token of an answer is never stored."""
        stored = [(r.prompt_tokens + r.output_tokens - 1) // BLOCK_SIZE for r in self.finished]
        return sum(stored) - self.cached_tokens // BLOCK_SIZE

    @property
    def prompt_tokens(self) -> int:
        return sum(record.prompt_tokens for record in self.finished)


def body(messages: Messages) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


async def run_load(turns: Sequence[Turn], model: str, pick_url: Callable[[], str], title: str) -> Outcome:
    """Send the turns at their times. `pick_url` is called for each request when it is sent."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        with tqdm(total=len(turns), desc=title, unit="req", leave=False) as bar:
            load = _Load(session, model, pick_url, bar)
            records = await load.run(turns)
    return Outcome(records=records, took_s=max(record.end_s for record in records))


class _Load:
    def __init__(
        self, session: aiohttp.ClientSession, model: str, pick_url: Callable[[], str], bar: "tqdm[Any]"
    ) -> None:
        self._session = session
        self._model = model
        self._pick_url = pick_url
        self._bar = bar
        self._latest: dict[int, asyncio.Task[Record]] = {}  # latest turn of each conversation
        self._start_s = time.perf_counter()

    async def run(self, turns: Sequence[Turn]) -> list[Record]:
        tasks = []
        for turn in turns:
            before = self._latest.get(turn.conversation)
            self._latest[turn.conversation] = task = asyncio.create_task(self._turn(turn, before))
            tasks.append(task)
        return await asyncio.gather(*tasks)

    async def _turn(self, turn: Turn, before: "asyncio.Task[Record] | None") -> Record:
        await asyncio.sleep(turn.at_s - self._now())
        history: Messages = [{"role": "system", "content": turn.system}]
        due_s = turn.at_s
        if before is not None:
            earlier = await before
            history = [*earlier.messages, {"role": "assistant", "content": earlier.text}]
            due_s = max(due_s, earlier.end_s)
        record = Record([*history, {"role": "user", "content": turn.content}])
        try:
            await self._send(record, due_s)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end_s = self._now()
        self._bar.update()
        return record

    async def _send(self, record: Record, due_s: float) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        request = {"model": self._model, **body(record.messages), **options}
        async with self._session.post(f"{self._pick_url()}/v1/chat/completions", json=request) as answer:
            if answer.status != 200:
                raise ValueError(f"{answer.status} {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self._add_chunk(record, json.loads(line[6:]), due_s)
        if not record.output_tokens:
            raise ValueError("the stream ended without usage")

    def _add_chunk(self, record: Record, chunk: dict[str, Any], due_s: float) -> None:
        if "error" in chunk:
            raise ValueError(str(chunk["error"]))
        for choice in chunk.get("choices", ()):
            text = choice["delta"].get("content") or ""
            if text and not record.text:
                record.ttft_s = self._now() - due_s
            record.text += text
        if usage := chunk.get("usage"):
            record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _now(self) -> float:
        return time.perf_counter() - self._start_s


async def oracle_tokens(outcome: Outcome, replica_url: str) -> int:
    """Return the tokens that the oracle would have found for the finished requests, in the order of sending."""
    known: set[int] = set()
    found = 0
    async with aiohttp.ClientSession() as session:
        for record in outcome.finished:
            prompt = await _render(session, replica_url, record.messages)
            found += BLOCK_SIZE * num_known(prompt, known)
            with_answer = [*record.messages, {"role": "assistant", "content": record.text}]
            whole = await _render(session, replica_url, with_answer)
            known.update(chain(whole[: len(prompt) + record.output_tokens - 1]))
    return found


async def _render(session: aiohttp.ClientSession, url: str, messages: Messages) -> list[int]:
    wants_answer = messages[-1]["role"] == "user"
    request = {**body(messages), "add_generation_prompt": wants_answer}
    async with session.post(f"{url}/v1/chat/completions/render", json=request) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        ids: list[int] = (await answer.json())["token_ids"]
        return ids


def chain(tokens: Sequence[int]) -> list[int]:
    """Return for each full block a hash of all tokens up to its end."""
    found, before = [], 0
    for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
        before = hash((before, *tokens[end - BLOCK_SIZE : end]))
        found.append(before)
    return found


def num_known(prompt: Sequence[int], known: set[int]) -> int:
    """Count the leading blocks that are known; the last token is always computed."""
    count = 0
    for block in chain(prompt[:-1]):
        if block not in known:
            break
        count += 1
    return count
