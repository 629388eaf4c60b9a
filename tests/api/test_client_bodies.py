"""Bodies that real clients sent, through a server and a router: each gets its status, and each stream ends well.

A file of `data/clients` has a request, or a list of some: the client's name and version, the path, the body, and the
status if it isn't 200. Texts are shortened, ids and paths replaced. `make test-clients` runs the clients themselves.
"""

import json
from pathlib import Path

import pytest
import pytest_asyncio
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = {path.stem: json.loads(path.read_text("utf-8")) for path in (Path(__file__).parent / "data/clients").iterdir()}
BODIES = {
    f"{name}-{i}": request
    for name, requests in sorted(FILES.items())
    for i, request in enumerate(requests if isinstance(requests, list) else [requests])
}
#: Last line of a stream, up to its first comma.
ENDINGS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/responses": 'data: {"type":"response.completed"',
    "/v1/messages": 'data: {"type":"message_stop"}',
}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    engine = ScriptedClient(folder, chat_template=TEMPLATE, max_model_len=32_768)
    tools = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
    async with serving(engine, tools=tools) as served, routing(served.url) as routed:
        await routed.routable(MODEL, 1)
        yield {"server": served, "router": routed}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("target", ["server", "router"])
async def test_a_recorded_body_is_answered(both, target, name):
    recorded = BODIES[name]
    body = {**recorded["body"], "model": MODEL}
    answer = await both[target].http.post(recorded["path"], json=body)
    assert answer.status_code == recorded.get("status", 200), answer.text
    if body.get("stream") and answer.status_code == 200:
        last = answer.text.rstrip("\n").splitlines()[-1]
        assert last.partition(",")[0] == ENDINGS[recorded["path"]]
    elif answer.status_code == 200:
        assert "error" not in answer.json() or answer.json()["error"] is None
