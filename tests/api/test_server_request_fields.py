"""Fields that a dialect doesn't define are served, ignored or refused, as docs/reference/request-fields.md says."""

import re
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from anthropic.types.beta import message_create_params as messages
from octavo_server.anthropic.messages import MessagesRequest
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.responses import ResponsesRequest
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).parents[2] / "docs/reference/request-fields.md"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %} {{ verbosity }} {{ enable_thinking }}"
HELLO = [{"role": "user", "content": "hi"}]
#: Path -> model of the body, fields of the official client, and the smallest body.
DIALECTS = {
    "/v1/chat/completions": (ChatCompletionRequest, chats.CompletionCreateParamsStreaming, {"messages": HELLO}),
    "/v1/completions": (CompletionRequest, completions.CompletionCreateParamsStreaming, {"prompt": "hi"}),
    "/v1/responses": (ResponsesRequest, responses.ResponseCreateParamsStreaming, {"input": "hi"}),
    "/v1/messages": (MessagesRequest, messages.MessageCreateParamsStreaming, {"messages": HELLO, "max_tokens": 5}),
}
#: Fields of a dialect that neither change the prompt nor the generated tokens.
HARMLESS = {
    *("background", "enable_response_messages", "include", "include_reasoning", "metadata", "request_id", "store"),
    *("stream_interval", "stream_options", "user", "truncation", "output_format", "thinking"),
    *("return_tokens_as_token_ids", "skip_reading_prefix_cache", "spaces_between_special_tokens", "truncation_side"),
    "guided_whitespace_pattern",
}  # fmt: skip
VALUES = {
    "thread": {"type": "create"},
    "thinking": {"type": "disabled"},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "background": True,
    "store": True,
}


def rows():
    """Path, field and handling of each field in the tables of the page."""
    for section in PAGE.read_text(encoding="utf-8").split("\n## POST ")[1:]:
        for fields, handling in re.findall(r"^\| (`.*?`) \| (\w+) \|", section, re.MULTILINE):
            for field in re.findall(r"`(\w+)`", fields):
                yield section.split("\n")[0], field, handling


ROWS = [*rows()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    async with serving(ScriptedClient(folder, chat_template=TEMPLATE)) as started:
        yield started


@pytest.mark.parametrize("path", DIALECTS)
async def test_every_field_of_the_official_clients_has_a_row(path):
    body, official, _ = DIALECTS[path]
    names = {name for kind in official.__mro__ for name in getattr(kind, "__annotations__", {})}
    assert names - set(body.model_fields) <= {field for row_path, field, _ in ROWS if row_path == path}


@pytest.mark.parametrize("path", DIALECTS)
async def test_every_field_that_another_dialect_serves_has_a_row(path):
    body, *_ = DIALECTS[path]
    served = {name for kind, *_ in DIALECTS.values() for name in kind.model_fields}
    assert served - set(body.model_fields) - HARMLESS <= {field for row_path, field, _ in ROWS if row_path == path}


async def test_no_field_has_two_rows():
    assert len({(path, field) for path, field, _ in ROWS}) == len(ROWS)


def handling_of(field, answer, plain):
    """Return "refused", "ignored" or "served", as seen from the answer and from what the engine got."""
    error = answer.get("error")
    if error is None:
        return "ignored" if answer == plain else "served"
    assert field in (error["param"] if "param" in error else error["message"])
    return "refused"


async def post(served, path, **fields):
    """Return the prompt and parameters that the engine gets, or the error."""
    served.engine.reset()
    answer = await served.http.post(path, json={**DIALECTS[path][2], **fields})
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        return answer.json()
    (request,) = served.engine.requests
    params = msgspec.to_builtins(request.params) | {"seed": None}  # it is random
    return {"prompt": request.prompt_token_ids, "params": params}


@pytest.mark.parametrize("path", DIALECTS)
async def test_fields_are_handled_as_the_page_says(server, path):
    documented = {field: handling for row_path, field, handling in ROWS if row_path == path}
    plain = await post(server, path)
    answers = {field: await post(server, path, **{field: VALUES.get(field, "low")}) for field in documented}
    assert {field: handling_of(field, answer, plain) for field, answer in answers.items()} == documented
    assert await post(server, path, **dict.fromkeys(documented)) == plain


async def test_values_that_ask_for_nothing_are_accepted(server):
    nothing = {"n": 1, "seed": None, "presence_penalty": 0, "repetition_penalty": 1.0, "stop": [], "logprobs": False}
    for path in ("/v1/responses", "/v1/messages"):
        answer = await server.http.post(path, json={**DIALECTS[path][2], **nothing})
        assert answer.status_code == 200, answer.text
