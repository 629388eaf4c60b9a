"""A fake replica that answers completions with their own prompts and keeps every request that reached it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from octavo_server.kv.card import KVModelCard, write_card

from octavo_testing.fake_replica import FakeReplica
from octavo_testing.raw_http import MODEL, PATH

#: Larger bodies aren't parsed, as that would stop the event loop that measures the router.
MAX_READ_BYTES = 16 * 1024
#: What a replica does with a request in place of answering it with 200.
Behavior = Callable[["Seen"], Awaitable[web.StreamResponse | None]]


@dataclass(frozen=True, slots=True)
class Seen:
    prompt: str  # empty for a body that isn't a completion's
    headers: dict[str, str]
    body: bytes


class RecordingReplica(FakeReplica):
    """`behave` may answer, wait or kill; None from it: the usual answer."""

    def __init__(self, behave: Behavior | None = None, *, models: tuple[str, ...] = (MODEL,)) -> None:
        super().__init__(models=models)
        self.seen: list[Seen] = []
        self.prompts: list[str] = []  # of `seen`, in order; several replicas may share one list
        self.behave = behave
        self._num_received = self._num_running = 0
        self.answers[PATH.decode()] = self._complete

    def serve_by_polling(self) -> None:
        """No KV stream, as a vLLM server: the router polls `/health`, `/v1/models` and `/metrics`."""
        self.status["/kv/events"] = 404
        self.bodies["/v1/models"] = json.dumps({"object": "list", "data": [{"id": m} for m in self.models]}).encode()
        self.set_vllm_load(0, 0)

    def show_card(self, card: KVModelCard) -> None:
        """Before `start`. Routers that have read it route by blocks, and by load where none match."""
        self.card = card.fingerprint
        self.bodies["/kv/model"] = write_card(card)
        self.begin()
        self._report()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen = Seen(_prompt(body), {name.lower(): value for name, value in request.headers.items()}, body)
        self.seen.append(seen)
        self.prompts.append(seen.prompt)
        self._num_received += 1
        self._num_running += 1
        self._report()
        try:
            return await self._answer(seen)
        finally:
            self._num_running -= 1
            self._report()

    async def _answer(self, seen: Seen) -> web.StreamResponse:
        answer = await self.behave(seen) if self.behave is not None else None
        if answer is None and not seen.prompt:
            answer = await answering(400)(seen)
        return answer or web.json_response({"choices": [{"index": 0, "text": seen.prompt, "finish_reason": "length"}]})

    def _report(self) -> None:
        """The load, as an engine publishes it after a step."""
        blocks = {"total_blocks": 4096, "free_blocks": 4096}
        self.step(received=self._num_received, running=self._num_running, **blocks)


def answering(status: int) -> Behavior:
    """Every request at once with this status."""

    async def behave(_: Seen) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": "no", "type": "x", "param": None, "code": status}}, status=status
        )

    return behave


def taking(seconds: float) -> Behavior:
    """The usual answer after this time, as a generation takes it."""

    async def behave(_: Seen) -> None:
        await asyncio.sleep(seconds)

    return behave


def _prompt(body: bytes) -> str:
    if len(body) > MAX_READ_BYTES:
        return ""
    try:
        return str(json.loads(body)["prompt"])
    except (ValueError, KeyError, TypeError):
        return ""
