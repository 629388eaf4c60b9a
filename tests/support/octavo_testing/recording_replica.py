"""A fake replica that answers completions with their own prompts and records every request."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from octavo_server.kv.card import KVModelCard, write_card

from octavo_testing.fake_replica import FakeReplica
from octavo_testing.raw_http import MODEL, PATH

#: Larger bodies aren't parsed, because parsing would block the event loop that measures the router.
MAX_READ_BYTES = 16 * 1024
#: Handles a request; returns a response, or None for the usual one with status 200.
Behavior = Callable[["Seen"], Awaitable[web.StreamResponse | None]]


@dataclass(frozen=True, slots=True)
class Seen:
    prompt: str  # empty for a body that isn't a completion's
    headers: dict[str, str]
    body: bytes


class RecordingReplica(FakeReplica):
    """`behave` may respond, wait or kill the replica; if it returns None, the usual response is sent."""

    def __init__(self, behave: Behavior | None = None, *, models: tuple[str, ...] = (MODEL,)) -> None:
        super().__init__(models=models)
        self.seen: list[Seen] = []
        self.prompts: list[str] = []  # of `seen`, in order; several replicas may share one list
        self.behave = behave
        self._num_received = self._num_running = 0
        self.answers[PATH.decode()] = self._complete

    def serve_by_polling(self) -> None:
        """Serve no KV stream, like a vLLM server, so that the router polls `/health`, `/v1/models` and `/metrics`."""
        self.status["/kv/events"] = 404
        self.bodies["/v1/models"] = json.dumps({"object": "list", "data": [{"id": m} for m in self.models]}).encode()
        self.set_vllm_load(0, 0)

    def show_card(self, card: KVModelCard) -> None:
        """Serve a model card, with which routers route by blocks, and by load where none match. Call before `start`."""
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
        """Publish the load, as an engine does after a step."""
        blocks = {"total_blocks": 4096, "free_blocks": 4096}
        self.step(received=self._num_received, running=self._num_running, **blocks)


def answering(status: int) -> Behavior:
    """Answer every request at once with this status."""

    async def behave(_: Seen) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": "no", "type": "x", "param": None, "code": status}}, status=status
        )

    return behave


def taking(seconds: float) -> Behavior:
    """Send the usual response after this time, which stands for the generation."""

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
