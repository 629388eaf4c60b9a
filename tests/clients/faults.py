"""Requests that fail, one for each kind of error, and the answers that OpenAI and Anthropic give in these cases.

The vendors' answers are those of their documentation and of their packages' tests. `vendor_server` sends the one that
the field `model` of a request names, so that a check can compare what its client makes of it and of Octavo's answer.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web
from obeying_server import FAIL, MODEL, REFUSE, WAIT

KEYS = {"admin": "sk-admin-0123456789", "once": "sk-once-0123456789", "any": "sk-any-0123456789"}
TENANTS = "tenants: {once: {requestsPerMinute: 1}}"
MAX_REQUEST_BYTES, MAX_MODEL_LEN = 64 * 1024, 4096
WAITING_S = 1.0  # the client's own limit where no answer comes; elsewhere `ANSWERED_S`
ANSWERED_S = 60.0


class Answer(NamedTuple):
    """`type` and `code` of an error in a vendor's answer. Status 0: none comes; 200: the error is in the stream."""

    status: int
    type: str
    message: str
    code: str | None = None


class Fault(NamedTuple):
    """`request`: what differs from a usual request to the keyed server with the key `any`."""

    request: dict[str, Any]
    openai: Answer
    anthropic: Answer


REQUEST: dict[str, Any] = {
    "url": "FAULTY_URL", "model": MODEL, "prompt": "Hello", "key": KEYS["any"], "fields": {}, "host": None,
    "stream": False, "timeout_s": ANSWERED_S, "repeats": 0,
}  # fmt: skip
_BUSY = "The server had an error while processing your request. Sorry about that!"
FAULTS = {
    "a wrong value (400)": Fault(
        {"fields": {"top_p": 7}},
        Answer(400, "invalid_request_error", "Invalid 'top_p': decimal above maximum.", "decimal_above_max_value"),
        Answer(400, "invalid_request_error", "top_p: Input should be less than or equal to 1"),
    ),
    "a wrong type (400)": Fault(
        {"fields": {"top_p": "high"}},
        Answer(400, "invalid_request_error", "Invalid type for 'top_p': expected a decimal.", "invalid_type"),
        Answer(400, "invalid_request_error", "top_p: Input should be a valid number"),
    ),
    "context (400)": Fault(
        {"prompt": "word " * 2000},
        Answer(
            400,
            "invalid_request_error",
            "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 289650 tokens. "
            "Please reduce the length of the messages.",
            "context_length_exceeded",
        ),
        Answer(400, "invalid_request_error", "prompt is too long: 208310 tokens > 200000 maximum"),
    ),
    "key (401)": Fault(
        {"key": "sk-wrong"},
        Answer(401, "invalid_request_error", "Incorrect API key provided: sk-wrong.", "invalid_api_key"),
        Answer(401, "authentication_error", "invalid x-api-key"),
    ),
    "host (403)": Fault(
        {"url": "OBEYING_URL", "host": "elsewhere.example"},
        Answer(
            403,
            "request_forbidden",
            "Country, region, or territory not supported",
            "unsupported_country_region_territory",
        ),
        Answer(403, "permission_error", "Your API key does not have permission to use the specified resource."),
    ),
    "model (404)": Fault(
        {"model": "absent"},
        Answer(404, "invalid_request_error", "The model `absent` does not exist.", "model_not_found"),
        Answer(404, "not_found_error", "model: absent"),
    ),
    "size (413)": Fault(
        {"prompt": "word " * 20_000},
        Answer(413, "server_error", "Maximum content size limit (26214400) exceeded."),
        Answer(413, "request_too_large", "Request exceeds the maximum size"),
    ),
    "limit (429)": Fault(
        {"key": KEYS["once"], "repeats": 1},
        Answer(429, "requests", "Rate limit reached on requests per min (RPM): Limit 3.", "rate_limit_exceeded"),
        Answer(429, "rate_limit_error", "This request would exceed your organization's rate limit."),
    ),
    "failure (500)": Fault(
        {"prompt": f"{FAIL}0>>"}, Answer(500, "server_error", _BUSY), Answer(500, "api_error", "Internal server error")
    ),
    "overload (503)": Fault(
        {"prompt": REFUSE},
        Answer(503, "server_error", "The engine is currently overloaded, please try again later"),
        Answer(529, "overloaded_error", "Overloaded"),
    ),
    "failure in a stream": Fault(
        {"prompt": f"{FAIL}3>> <<1>>a long answer<<end>>", "stream": True},
        Answer(200, "server_error", _BUSY),
        Answer(200, "api_error", "Internal server error"),
    ),
    "timeout": Fault({"prompt": WAIT, "timeout_s": WAITING_S}, Answer(0, "", ""), Answer(0, "", "")),
}


def faults() -> str:
    """JSON that describes the requests, for the checks."""
    return json.dumps([{"column": column, **REQUEST, **fault.request} for column, fault in FAULTS.items()])


@asynccontextmanager
async def vendor_server() -> AsyncIterator[str]:
    """Run a server that answers every POST with the error that the request's model names; yield its address."""
    app = web.Application()
    app.router.add_post("/{path:.*}", _answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _answer(request: web.Request) -> web.StreamResponse:
    fault = FAULTS[(await request.json())["model"]]
    is_anthropic = request.path.endswith("/messages")
    answer = fault.anthropic if is_anthropic else fault.openai
    if answer.status == 0:
        await asyncio.Event().wait()
    body = _anthropic_body(answer) if is_anthropic else _openai_body(answer)
    if answer.status != 200:
        return web.json_response(body, status=answer.status)
    if is_anthropic:
        frames = f"event: message_start\ndata: {json.dumps(_MESSAGE)}\n\nevent: error\ndata: {json.dumps(body)}\n\n"
    elif request.path.endswith("/responses"):
        failed = {"type": "response.failed", "sequence_number": 1, "response": _RESPONSE | {"error": _failure(answer)}}
        frames = f"event: response.failed\ndata: {json.dumps(failed)}\n\n"
    else:
        frames = f"data: {json.dumps(_CHUNK)}\n\ndata: {json.dumps(body)}\n\n"
    return web.Response(text=frames, content_type="text/event-stream")


def _openai_body(answer: Answer) -> dict[str, Any]:
    return {"error": {"message": answer.message, "type": answer.type, "param": None, "code": answer.code}}


def _anthropic_body(answer: Answer) -> dict[str, Any]:
    return {"type": "error", "error": {"type": answer.type, "message": answer.message}}


def _failure(answer: Answer) -> dict[str, str]:
    return {"code": answer.type, "message": answer.message}


_CHUNK = {
    "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": "{"}, "finish_reason": None}],
}  # fmt: skip
_MESSAGE = {
    "type": "message_start",
    "message": {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 0},
    },
}  # fmt: skip
_RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "status": "failed", "model": "m", "output": [],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
}  # fmt: skip
