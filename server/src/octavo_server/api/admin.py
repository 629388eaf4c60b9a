"""For whoever runs the server: what the engine is doing with each request, its settings, and a fresh prefix cache.

Nothing here shows a prompt, an answer or a key.
"""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter
from octavo_engine.wire.inspection import SequenceInfo
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.context import context_of
from octavo_server.api.openapi import answers
from octavo_server.json_responses import json_reply

router = APIRouter()


class DebugRequests(msgspec.Struct):
    """The sequences that run, then those that wait, each in the order in which they are served."""

    running: int
    waiting: int
    sequences: list[SequenceInfo]


class ResetAnswer(msgspec.Struct, omit_defaults=True):
    reset: bool
    reason: str | None = None


IN_USE = "blocks are in use by unfinished requests, so nothing was forgotten: try again when /debug/requests is empty."


@router.get("/debug/requests", **answers("What runs and what waits, and why", DebugRequests, refusals=(503,)))
async def debug_requests(request: Request) -> Response:
    sequences = await context_of(request).client.debug_requests()
    running = sum(info.state == "running" for info in sequences)
    return json_reply(DebugRequests(running, len(sequences) - running, sequences))


@router.post("/reset_prefix_cache", **answers("Forget all cached KV blocks", ResetAnswer, refusals=(503,)))
async def reset_prefix_cache(request: Request) -> Response:
    """200 in either case, as vLLM answers; the body says whether it was done."""
    done = await context_of(request).client.reset_prefix_cache()
    return json_reply(ResetAnswer(done, None if done else IN_USE))


@router.get("/server_info", **answers("Version and engine settings", dict[str, Any]))
async def server_info(request: Request) -> Response:
    client = context_of(request).client
    ready = {name: value for name, value in asdict(client.ready_info).items() if name != "hash_root"}
    return json_reply({"version": version("octavo-server"), "engine_config": asdict(client.config), "engine": ready})
