"""`/invocations`: the shape of the body decides between chat and completions, whose endpoints answer."""

import pytest
from octavo_server.api import invocations, request_parsing
from octavo_testing.server import events
from starlette.responses import Response

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
COMPLETION = {"prompt": "hi", "max_tokens": 5}
SHAPES = {"chat": (CHAT, "chat.completion"), "completion": (COMPLETION, "text_completion")}


@pytest.mark.parametrize(("body", "kind"), SHAPES.values(), ids=SHAPES.keys())
async def test_the_shape_of_the_body_decides_the_endpoint(served, body, kind):
    answer = (await served.http.post("/invocations", json=body)).json()
    assert (answer["object"], answer["usage"]["completion_tokens"]) == (kind, 5)
    streamed = await served.http.post("/invocations", json={**body, "stream": True})
    *chunks, done = events(streamed.text)
    assert chunks
    assert done == "[DONE]"


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "messages"), ({"input": "hi"}, "messages"), ({**CHAT, "temperature": 9}, "temperature")],
    ids=["empty", "another shape", "a wrong value"],
)
async def test_error_names_the_field(served, body, param):
    answer = await served.http.post("/invocations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_disconnect_aborts_the_request(served):
    served.engine.hold_at = 3
    async with served.http.stream("POST", "/invocations", json={**CHAT, "stream": True}) as answer:
        await anext(answer.aiter_text())
    assert await served.engine.aborted.get()


async def test_a_body_is_not_kept_once_its_endpoint_has_read_it(served, monkeypatch):
    """The memory of bodies counts it once, with what is parsed of it."""
    freed = []

    class Body(bytes):
        def __del__(self) -> None:
            freed.append(len(self))

    async def read(*_):
        return Body(b'{"prompt": "hi"}')

    async def endpoint(request):
        message = await request.receive()
        assert not freed
        del message
        return Response(str(freed))

    monkeypatch.setattr(request_parsing, "read_raw", read)
    monkeypatch.setattr(invocations, "create_completion", endpoint)
    assert (await served.http.post("/invocations", json=COMPLETION)).text == "[16]"
