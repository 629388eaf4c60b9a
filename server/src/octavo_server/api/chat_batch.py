"""`POST /v1/chat/completions/batch`: several conversations in one request, with one choice for each, as in vLLM.

Tools and streams are refused.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter
from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo_server.api.chat import prepare, share
from octavo_server.api.chat_writer import ChatWriter
from octavo_server.api.context import ApiContext, context_of
from octavo_server.api.openapi import accepts
from octavo_server.api.request_parsing import held_body, parse_body
from octavo_server.config import RequestLimits
from octavo_server.http.responses import CancellableJSONResponse
from octavo_server.openai.chat import ChatCompletion, ChatCompletionRequest, ChatMessage
from octavo_server.openai.entries import Entries
from octavo_server.openai.fields import GenerationFields
from octavo_server.openai.limits import check_counts
from octavo_server.openai.request_parser import validate_entries, validate_request
from octavo_server.openai.tools import Tool
from octavo_server.openai.unsupported import refuse_unsupported

router = APIRouter()


class BatchChatRequest(GenerationFields):
    """`messages` holds a list of messages for each conversation; the other fields are those of a chat request."""

    ENTRY_MODELS: ClassVar[dict[str, type[BaseModel]]] = {"tools": Tool}

    messages: Entries[Entries[dict[str, Any]]]
    tools: Entries[Tool] | None = None

    def conversations(self, limits: RequestLimits) -> list[ChatCompletionRequest]:
        """One chat request for each conversation. Raises InvalidRequest and MalformedRequest."""
        self._check(limits)
        shared = self.model_dump(exclude_unset=True, exclude={"messages", "tools"}, by_alias=True)
        request = validate_request({**shared, "messages": []}, ChatCompletionRequest)
        return [self._conversation(request, messages, limits) for messages in self.messages]

    def _conversation(
        self, shared: ChatCompletionRequest, messages: list[dict[str, Any]], limits: RequestLimits
    ) -> ChatCompletionRequest:
        check_counts({"messages": messages}, limits)
        request = shared.model_copy(update={"messages": validate_entries(messages, ChatMessage, "messages")})
        request.check()
        return request

    def _check(self, limits: RequestLimits) -> None:
        for name, is_sent in {"stream": self.stream, "tools": self.tools, "n": (self.n or 1) != 1}.items():
            if is_sent:
                raise InvalidRequest(f"{name} is not supported in a batch: send single chat requests.", param=name)
        if not self.messages:
            raise InvalidRequest("messages must hold at least one conversation.", param="messages")
        if len(self.messages) > limits.max_prompts:
            raise InvalidRequest(
                f"messages holds {len(self.messages)} conversations, more than {limits.max_prompts}, the limit: send "
                "fewer, or start the server with a larger --max-prompts.",
                param="messages",
            )


@router.post(
    "/v1/chat/completions/batch", **accepts(BatchChatRequest, "Answer several conversations", answer=ChatCompletion)
)
async def create_chat_batch(request: Request) -> Response:
    arrival_s = time.monotonic()
    context = context_of(request)
    context.check_queue(request)
    async with held_body(request, partial(_parse, context)) as (bodies, num_bytes):
        meta = context.new_response_meta("chatcmpl-", request, bodies[0])
        run = partial(context.threads.run, num_bytes=num_bytes)
        shared = await run(partial(share, context, bodies[0]))
        chats = [await run(partial(prepare, context, body, shared)) for body in bodies]
    prompts = [replace(chat.prompt, resolved=chat.resolved) for chat in chats]
    generation = context.new_generation(meta, bodies[0], prompts, shared.resolved, arrival_s)
    writer = ChatWriter(context, meta, bodies[0], generation, output_parsing=chats[0].output_parsing)
    for choice, chat in zip(writer.state.choices, chats, strict=True):
        choice.parser = chat.output_parsing.new_parser(context.client.frontend.tokenizer.token_id)
    return CancellableJSONResponse(context.in_flight, meta.id, writer.body, writer.state.headers)


def _parse(context: ApiContext, raw: bytes) -> list[ChatCompletionRequest]:
    body = parse_body(context, BatchChatRequest, raw)
    context.resolve_model_name(body.model)
    refuse_unsupported(body)
    return body.conversations(context.config.limits)
