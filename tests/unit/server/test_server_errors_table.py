"""The table from exceptions to HTTP errors."""

import pytest
from octavo_engine.wire.errors import (
    AdapterNameTaken,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    OctavoError,
    Overloaded,
    Unavailable,
)
from octavo_server.openai import sse
from octavo_server.openai.errors import (
    Forbidden,
    GenerationFailed,
    MalformedRequest,
    RequestTimeout,
    RequestTooLarge,
    Unauthorized,
    describe,
    is_known,
)
from starlette.exceptions import HTTPException

TABLE = [
    (InvalidRequest("x", param="n"), 400, "BadRequestError", "n"),
    (MalformedRequest("x", param="n"), 400, "Bad Request", "n"),
    (AdapterNameTaken("a"), 400, "InvalidUserInput", None),
    (ContextLengthExceeded(max_model_len=8, num_requested=4, num_input=6), 400, "BadRequestError", "input_tokens"),
    (Unauthorized("x"), 401, "AuthenticationError", None),
    (Forbidden("x"), 403, "PermissionDeniedError", None),
    (ModelNotFound("m"), 404, "NotFoundError", None),
    (RequestTimeout("x"), 408, "RequestTimeoutError", None),
    (RequestTooLarge(6, limit=5, is_all=True), 413, "RequestTooLargeError", None),
    (Overloaded("x", retry_after_s=3.2), 429, "RateLimitError", None),
    (GenerationFailed("x"), 500, "InternalServerError", None),
    (Unavailable("x", retry_after_s=5), 503, "ServiceUnavailableError", None),
    (EngineDead("x"), 503, "ServiceUnavailableError", None),
    (HTTPException(405), 405, "Method Not Allowed", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "param"), TABLE, ids=[type(e).__name__ for e, *_ in TABLE])
def test_each_error_has_its_status_type_and_param(error, status, kind, param):
    described = describe(error)
    assert (described.status, described.type, described.param) == (status, kind, param)
    assert is_known(error)
    code = "context_length_exceeded" if isinstance(error, ContextLengthExceeded) else status
    assert described.envelope()["error"]["code"] == code


def test_unknown_error_reveals_no_details():
    described = describe(KeyError("secret"))
    assert (described.status, described.type) == (500, "InternalServerError")
    assert "secret" not in described.message
    assert not is_known(KeyError("secret"))
    assert not is_known(OctavoError("secret"))


def test_overload_has_retry_after():
    assert describe(Overloaded("x", retry_after_s=3.2)).headers == {"Retry-After": "3"}
    assert describe(Overloaded("x", retry_after_s=0.1)).headers == {"Retry-After": "1"}
    assert describe(Unavailable("x", retry_after_s=5)).headers == {"Retry-After": "5"}


def test_context_length_error_has_vllm_s_text_and_openai_s_code():
    """LangChain looks for the code in the text of the exception, where the package openai shows only the message."""
    error = ContextLengthExceeded(max_model_len=2048, num_requested=100, num_input=2000)
    assert describe(error).message == (
        "This model's maximum context length is 2048 tokens. However, you requested 100 output tokens and your prompt "
        "contains at least 2000 input tokens, for a total of at least 2100 tokens. Please reduce the length of the "
        "input prompt or the number of requested output tokens. (parameter=input_tokens, value=2000) "
        "(code=context_length_exceeded)"
    )


def test_error_frame_has_the_error_body():
    assert sse.error_frame(EngineDead("gone")) == (
        b'data: {"error":{"message":"gone","type":"ServiceUnavailableError","param":null,"code":503}}\n\n'
    )
