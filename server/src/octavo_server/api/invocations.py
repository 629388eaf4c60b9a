"""`POST /invocations`, as SageMaker calls it: a body with `messages` is a chat request, one with `prompt` a completion.

The endpoint of that shape reads the body again, so fields, limits, errors and streams can't differ.
"""

from functools import partial
from typing import Any

from fastapi import APIRouter
from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel, ConfigDict, RootModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from octavo_server.api.chat import create_chat_completion
from octavo_server.api.completions import create_completion
from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import parse_body, read_body
from octavo_server.openai.chat import ChatCompletion, ChatCompletionRequest
from octavo_server.openai.completion import Completion, CompletionRequest

router = APIRouter()


class InvocationShape(BaseModel):
    """The fields that decide the endpoint."""

    model_config = ConfigDict(extra="ignore")

    messages: Any = None
    prompt: Any = None


class InvocationRequest(RootModel[ChatCompletionRequest | CompletionRequest]):
    """The body as the API document declares it."""


@router.post(
    "/invocations",
    **accepts(
        InvocationRequest, "Answer a chat or completion request", answer=(ChatCompletion, Completion), streams=True
    ),
)
async def invoke(request: Request) -> Response:
    context = context_of(request)
    context.check_queue(request)
    (unread, is_chat), _ = await read_body(request, partial(_parse, context))
    endpoint = create_chat_completion if is_chat else create_completion
    return await endpoint(_with_body(request, unread))


def _parse(context: ApiContext, raw: bytes) -> tuple[list[bytes], bool]:
    """Return a list with the body, from which the endpoint reads it again, and whether it is a chat request."""
    shape = parse_body(context, InvocationShape, raw)
    if shape.messages is None and shape.prompt is None:
        raise InvalidRequest("The body needs messages (a chat request) or prompt (a completion).", param="messages")
    return [raw], shape.messages is not None


def _with_body(request: Request, unread: list[bytes]) -> Request:
    """The same request, whose body can be read again."""

    async def receive() -> Message:
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    return Request(request.scope, receive)
