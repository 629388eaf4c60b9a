"""Body of `/v1/chat/completions/batch`: several conversations with the same fields. Tools and streams are refused."""

from typing import Any, ClassVar

from octavo_engine.wire.errors import InvalidRequest
from pydantic import BaseModel

from octavo_server.config import RequestLimits
from octavo_server.openai.chat import ChatCompletionRequest, ChatMessage
from octavo_server.openai.entries import Entries
from octavo_server.openai.fields import GenerationFields
from octavo_server.openai.limits import check_counts
from octavo_server.openai.request_parser import validate_entries, validate_request
from octavo_server.openai.tools import Tool


class BatchChatRequest(GenerationFields):
    """`messages` holds one list of messages for each conversation; other fields are those of a chat request."""

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
