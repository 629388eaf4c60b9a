"""The table from exceptions to HTTP errors: status and OpenAI's error body, which is also used for stream events.

OpenAI's clients read the nested body `{"error": {"message", "type", "param", "code"}}`; `code` is the status as an
integer, as in vLLM. An exception outside the table is a bug: status 500, with its details only in the log.
"""

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from octavo_engine.wire.errors import EngineDead, InvalidRequest, ModelNotFound, OctavoError, Overloaded, Unavailable
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

MAX_REPORTED_FIELDS = 5
MAX_DESCRIBED_ERRORS = 1000
MAX_MESSAGE_CHARS = 2000


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


class NotStored(OctavoError):
    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Response {response_id!r} was not found: this server stores no responses. Keep the response of "
            "POST /v1/responses, and send its items as input of the next request."
        )


class ThreadNotFound(OctavoError):
    """The request continues a conversation of Anthropic's API that the server should have kept."""

    def __init__(self, message_id: str | None) -> None:
        super().__init__(
            f"The thread of message {message_id!r} was not found: this server stores no threads. Send the whole "
            "conversation, without thread."
        )


class InvalidAdapterCall(InvalidRequest):
    """A call about an adapter lacks a field, or names an adapter that is loaded already."""


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
    code: int


class ErrorResponse(BaseModel):
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class ApiError:
    status: int
    type: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    detail_code: str | None = None  # for clients of Anthropic's API

    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}

    def body(self) -> bytes:
        return msgspec.json.encode(self.envelope())


#: Class of the exception, HTTP status, `type` in the body. The first match counts: subclasses precede their base class.
_TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (MalformedRequest, 400, "Bad Request"),
    (InvalidAdapterCall, 400, "InvalidUserInput"),
    (InvalidRequest, 400, "BadRequestError"),
    (Unauthorized, 401, "AuthenticationError"),
    (Forbidden, 403, "PermissionDeniedError"),
    (ModelNotFound, 404, "NotFoundError"),
    (AdapterNotFound, 404, "NotFoundError"),
    (NotStored, 404, "NotFoundError"),
    (ThreadNotFound, 404, "NotFoundError"),
    (NotEnabled, 404, "NotFoundError"),
    (WrongRunner, 404, "NotFoundError"),
    (RequestTimeout, 408, "RequestTimeoutError"),
    (Conflict, 409, "ConflictError"),
    (RequestTooLarge, 413, "RequestTooLargeError"),
    (Overloaded, 429, "RateLimitError"),
    (Unavailable, 503, "ServiceUnavailableError"),
    (EngineDead, 503, "ServiceUnavailableError"),
    (GenerationFailed, 500, "InternalServerError"),
    (ReplicaLost, 502, "BadGatewayError"),
    (ReplicaTimeout, 504, "GatewayTimeoutError"),
)


def is_known(error: Exception) -> bool:
    return isinstance(error, (HTTPException, *(kind for kind, _, _ in _TABLE)))


def describe(error: Exception) -> ApiError:
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        return ApiError(error.status_code, phrase, str(error.detail), headers=dict(error.headers or {}))
    for kind, status, name in _TABLE:
        if isinstance(error, kind):
            code = "thread_not_found" if isinstance(error, ThreadNotFound) else None
            param = getattr(error, "param", None)
            return ApiError(status, name, _shortened(str(error)), param, _headers(error), code)
    return ApiError(500, "InternalServerError", "Internal server error.")


#: Replacements of pydantic messages that name Python types or classes of this package.
_MESSAGES = dict.fromkeys(("model_type", "dict_type"), "Input should be an object") | {
    "list_type": "Input should be a valid array"
}


def _shortened(message: str) -> str:
    """Cut out the middle of a long message, which may quote a value of any length, such as a model's name."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} ... {message[-half:]}"


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
        return {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return {}
