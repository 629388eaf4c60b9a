"""Errors in the form of Anthropic's API, `{"type": "error", "error": {"type", "message"}}`, on the routes of messages.

The table of `openai.errors` decides the status, the type and the message of every exception.
"""

from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from octavo_server.anthropic.routes import is_messages_path
from octavo_server.openai.errors import ApiError, describe
from octavo_server.openai.sse import named_frame


class MessagesError(BaseModel):
    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesErrorResponse(BaseModel):
    type: Literal["error"] = "error"
    error: MessagesError


def messages_error(error: ApiError) -> dict[str, Any]:
    details = {} if error.messages_code is None else {"details": {"error_code": error.messages_code}}
    message = error.messages_words or error.message
    return {"type": "error", "error": {"type": error.messages_type, "message": message, **details}}


def error_event(error: Exception) -> bytes:
    """Last frame of a stream of events that failed after it had started."""
    return named_frame("error", messages_error(describe(error)))


def error_body(error: ApiError, path: str) -> bytes:
    """JSON body of an error, in the form of the API that `path` belongs to."""
    return msgspec.json.encode(messages_error(error)) if is_messages_path(path) else error.body()
