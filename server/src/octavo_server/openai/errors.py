"""The table from exceptions to HTTP errors of both dialects: status, types, codes and words, for bodies and streams.

OpenAI's clients read the nested body `{"error": {"message", "type", "param", "code"}}`; `code` is the status as an
integer, as in vLLM, but for errors that clients recognise by OpenAI's code. `anthropic.errors` writes the same errors
in Anthropic's form. An exception outside the table is a bug: status 500, with its details only in the log.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from octavo_engine.wire.errors import (
    AdapterNameTaken,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    OctavoError,
    Overloaded,
    Unavailable,
    shortened,
)
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

MAX_REPORTED_FIELDS = 5
MAX_DESCRIBED_ERRORS = 1000


class MalformedRequest(InvalidRequest):
    """The body is not JSON, or a field has a wrong type."""


class RequestTooLarge(OctavoError):
    """The body exceeds the limit. `is_all`: `num_bytes` is the whole body's declared size, not the part read so far."""

    def __init__(self, num_bytes: int, *, limit: int, is_all: bool) -> None:
        size = f"{num_bytes} bytes" if is_all else f"at least {num_bytes} bytes"
        super().__init__(
            f"The request body has {size}; the limit is {limit}: send less, or start the server with a larger "
            "--max-request-bytes."
        )


class RequestTimeout(OctavoError):
    """The client did not send its whole request in time."""


class Unauthorized(OctavoError):
    """The API key is missing or wrong."""


class Forbidden(OctavoError):
    """The API key is valid, but has no right to use this route."""


class RateLimited(Overloaded):
    """The API key has used up one of its limits. `headers`: response headers with the rest of each limit."""

    def __init__(self, message: str, retry_after_s: float, headers: dict[str, str]) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers


class NotStored(OctavoError):
    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Response {response_id!r} was not found: this server stores no responses. Keep the response of "
            "POST /v1/responses, and send its items as input of the next request."
        )


class NotCompacted(OctavoError):
    def __init__(self) -> None:
        super().__init__("This server compacts no conversations: send all items, or your own summary, as input.")


class ThreadNotFound(OctavoError):
    """The request continues a conversation of Anthropic's API that the server should have kept."""

    def __init__(self, message_id: str | None) -> None:
        super().__init__(
            f"The thread of message {message_id!r} was not found: this server stores no threads. Send the whole "
            "conversation, without thread."
        )


class InvalidAdapterCall(InvalidRequest):
    """A call about an adapter lacks a field, or names the served model."""


class AdapterNotFound(OctavoError):
    def __init__(self, name: str) -> None:
        super().__init__(f"The lora adapter '{name}' cannot be found.")


class NotEnabled(OctavoError):
    def __init__(self, route: str, flag: str) -> None:
        super().__init__(f"{route} is switched off: start the server with {flag}.")


class WrongRunner(OctavoError):
    """The route is one of models of another kind: of embedding models, or of models that generate text."""


class Conflict(OctavoError):
    """Another request changed the server's state meanwhile."""


class GenerationFailed(OctavoError):
    """The engine ended a request with finish reason "error"; the client may send the request again."""


class ReplicaLost(OctavoError):
    """The replica to which a router sent the request failed, or sent an invalid response."""


class ReplicaTimeout(OctavoError):
    """The replica to which a router sent the request did not answer in time."""


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int | str


class ErrorResponse(BaseModel):
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class ApiError:
    """`code`: OpenAI's; None: the status. `messages_words` and `messages_code` are for clients of Anthropic's API: the
    message, unless it is the same, and `details.error_code`."""

    status: int
    type: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    code: str | None = None
    messages_words: str | None = None
    messages_code: str | None = None

    def envelope(self) -> dict[str, Any]:
        code = self.status if self.code is None else self.code
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": code}}

    @property
    def messages_type(self) -> str:
        default = "invalid_request_error" if self.status < 500 else "api_error"
        return next((c.messages_type for c in _TABLE if c.status == self.status and c.messages_type), default)

    def body(self) -> bytes:
        return msgspec.json.encode(self.envelope())


class Condition(NamedTuple):
    """A kind of error. `type` and `code` are OpenAI's; `messages_type`, `messages_code` and `messages_words` are
    Anthropic's, and None if they follow from the status or the message."""

    error: type[Exception]
    status: int
    type: str
    messages_type: str | None = None
    code: str | None = None
    messages_code: str | None = None
    messages_words: Callable[[Any], str] | None = None


def _too_long(error: ContextLengthExceeded) -> str:
    """Return Anthropic's message, from which agents read the excess. A prompt must leave room for an output."""
    most = min(error.max_model_len, error.num_input - 1)
    return f"prompt is too long: {error.num_input} tokens > {most} maximum"


#: The first match counts: subclasses precede their base class.
_TABLE: tuple[Condition, ...] = (
    Condition(MalformedRequest, 400, "Bad Request"),
    Condition(InvalidAdapterCall, 400, "InvalidUserInput"),
    Condition(AdapterNameTaken, 400, "InvalidUserInput"),
    Condition(ContextLengthExceeded, 400, "BadRequestError", code="context_length_exceeded", messages_words=_too_long),
    Condition(InvalidRequest, 400, "BadRequestError"),
    Condition(Unauthorized, 401, "AuthenticationError", "authentication_error"),
    Condition(Forbidden, 403, "PermissionDeniedError", "permission_error"),
    Condition(ModelNotFound, 404, "NotFoundError", "not_found_error"),
    Condition(AdapterNotFound, 404, "NotFoundError"),
    Condition(NotStored, 404, "NotFoundError"),
    Condition(NotCompacted, 404, "NotFoundError"),
    Condition(ThreadNotFound, 404, "NotFoundError", messages_code="thread_not_found"),
    Condition(NotEnabled, 404, "NotFoundError"),
    Condition(WrongRunner, 404, "NotFoundError"),
    Condition(RequestTimeout, 408, "RequestTimeoutError"),
    Condition(Conflict, 409, "ConflictError"),
    Condition(RequestTooLarge, 413, "RequestTooLargeError", "request_too_large"),
    Condition(RateLimited, 429, "RateLimitError", "rate_limit_error", code="rate_limit_exceeded"),
    Condition(Overloaded, 429, "RateLimitError", "rate_limit_error"),
    Condition(Unavailable, 503, "ServiceUnavailableError", "overloaded_error"),
    Condition(EngineDead, 503, "ServiceUnavailableError", "overloaded_error"),
    Condition(GenerationFailed, 500, "InternalServerError"),
    Condition(ReplicaLost, 502, "BadGatewayError"),
    Condition(ReplicaTimeout, 504, "GatewayTimeoutError", "timeout_error"),
)


def is_known(error: Exception) -> bool:
    return isinstance(error, (HTTPException, *(condition.error for condition in _TABLE)))


def describe(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        return ApiError(error.status_code, phrase, str(error.detail), headers=dict(error.headers or {}))
    condition = next((condition for condition in _TABLE if isinstance(error, condition.error)), None)
    if condition is None:
        return ApiError(500, "InternalServerError", "Internal server error.")
    return ApiError(
        condition.status,
        condition.type,
        shortened(str(error)),
        getattr(error, "param", None),
        _headers(error),
        code=condition.code,
        messages_words=condition.messages_words and condition.messages_words(error),
        messages_code=condition.messages_code,
    )


#: Replacements of pydantic messages that name Python types or classes of this package.
_MESSAGES = dict.fromkeys(("model_type", "dict_type"), "Input should be an object") | {
    "list_type": "Input should be a valid array"
}


def malformed(error: ValidationError, where: str = "") -> MalformedRequest:
    """Convert pydantic's error to one that names each wrong field once, though pydantic reports a failure for each
    member of a union. `where`: path of the validated value.

    pydantic describes all failures or none, so above `MAX_DESCRIBED_ERRORS` failures the message only has their number.
    """
    if error.error_count() > MAX_DESCRIBED_ERRORS:
        fields = f"{where or 'The body'} has {error.error_count()} fields with wrong names or types"
        return MalformedRequest(f"{fields}: send those that the API documents.", param=where or None)
    messages: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        messages.setdefault(_field(item["loc"], where), _MESSAGES.get(item["type"], item["msg"]))
    shown = [f"{name}: {message}" if name else message for name, message in messages.items()]
    more = f" (and {len(shown) - MAX_REPORTED_FIELDS} more)" if len(shown) > MAX_REPORTED_FIELDS else ""
    return MalformedRequest("; ".join(shown[:MAX_REPORTED_FIELDS]) + more, param=next(iter(messages), None) or None)


def _field(location: tuple[int | str, ...], where: str) -> str:
    """Path of a field, such as `messages[0].content`, without the names that pydantic adds for members of a union."""
    parts = [f"[{p}]" if isinstance(p, int) else f".{p}" for p in location if isinstance(p, int) or _is_field_name(p)]
    return (where + "".join(parts)).removeprefix(".")


def _is_field_name(part: str) -> bool:
    return part.islower() and part.isidentifier() and part not in ("str", "int", "float", "bool")


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RequestTimeout):
        return {"Connection": "close"}
    if isinstance(error, (Overloaded, Unavailable)):
        own = error.headers if isinstance(error, RateLimited) else {}
        return {"Retry-After": str(max(1, round(error.retry_after_s))), **own}
    return {}
