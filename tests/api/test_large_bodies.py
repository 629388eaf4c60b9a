"""Large bodies at an engine's server and at a router are parsed off the event loop and freed before the response."""

import gc
import threading

import pytest
from octavo_server.config import QueueLimits
from octavo_server.openai.chat import ChatMessage
from octavo_server.openai.request_parser import parse_request
from octavo_server.router.prompts.prompt_source import PromptSource
from octavo_testing.hostile_bodies import COMPLETION, SHAPES, hostile_body
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.slow

LARGE, SMALL = 128 * 1024, 8 * 1024
CHAT = "/v1/chat/completions"


@pytest.fixture
async def served(tmp_path):
    queue = QueueLimits(max_num_queued_reqs=8)
    engine = ScriptedClient(write_byte_model(tmp_path), max_model_len=16_384)
    async with serving(engine, queue=queue) as started:
        yield started


@pytest.fixture
def parsed_in(monkeypatch):
    """The threads in which bodies were parsed."""
    threads = []

    def parse(*args):
        threads.append(threading.current_thread())
        return parse_request(*args)

    def parse_fields(source, raw):
        threads.append(threading.current_thread())
        return of_router(source, raw)

    of_router = PromptSource._parse
    monkeypatch.setattr("octavo_server.api.request_parsing.parse_request", parse)
    monkeypatch.setattr(PromptSource, "_parse", parse_fields)
    return threads


async def test_only_small_bodies_are_parsed_on_the_event_loop(served, parsed_in):
    async with routing(served.url) as routed:
        await routed.routable(MODEL, 1)
        for num_bytes, is_large in ((SMALL, False), (LARGE, True)):
            path, body = hostile_body("long text", num_bytes)
            answer = await routed.http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == (400 if is_large else 200)
            at_router, at_engine = parsed_in[-2:]
            for thread in (at_router, at_engine):
                assert (thread is not threading.main_thread()) == is_large


async def test_every_shape_gets_a_short_response_and_leaves_no_memory(served):
    for name in SHAPES:
        path, body = hostile_body(name, LARGE)
        answer = await served.http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (name, answer.text)
        assert len(answer.content) < 4000, name
    assert served.server.config.app.state.context.body_budget.num_bytes == 0


async def test_messages_are_freed_before_the_response(served):
    served.engine.hold_at = 1
    body = {"messages": [{"role": "user", "content": "a"}] * 100, "stream": True}
    async with served.http.stream("POST", CHAT, json=body) as answer:
        await served.engine.held.wait()
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is ChatMessage]
        served.engine.resumed.set()
        assert (await answer.aread()).endswith(b"[DONE]\n\n")


async def test_prompts_times_n_are_bounded(served):
    refused = await served.http.post(COMPLETION, json={"prompt": ["a"] * 3, "n": 3})
    assert refused.status_code == 400
    assert "--max-num-queued-reqs" in refused.json()["error"]["message"]
    answer = await served.http.post(COMPLETION, json={"prompt": ["a"] * 4, "n": 2})
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 8)


async def test_bodies_beyond_the_budget_are_refused(tmp_path):
    path, body = hostile_body("long text", 8192)
    engine = ScriptedClient(write_byte_model(tmp_path), max_model_len=16_384)
    async with (
        serving(engine, max_body_memory=8000) as served,
        routing(served.url, max_body_memory=8000) as routed,
    ):
        await routed.routable(MODEL, 1)
        for http in (served.http, routed.http):
            answer = await http.post(path, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "--max-body-memory" in answer.json()["error"]["message"]
            assert (await http.post(COMPLETION, json={"prompt": "a"})).status_code == 200
