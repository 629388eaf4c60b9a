"""A request with many prompts: its parameters are checked once, bad words tokenised off the event loop, and the prompts
start a few at a time."""

import asyncio
import threading
from collections import Counter

import pytest
from octavo_server.api.generation import STARTED_AT_ONCE
from octavo_server.openai.chat import ChatCompletionRequest

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURN = [{"role": "user", "content": "hi"}]
BODIES = {
    "prompts": ("/v1/completions", {"prompt": ["a", "b", "c"]}),
    "chat": ("/v1/chat/completions", {"messages": TURN}),
    "conversations": ("/v1/chat/completions/batch", {"messages": [TURN] * 3}),
    "render": ("/v1/completions/render", {"prompt": ["a", "b", "c"]}),
}


@pytest.fixture
def encoded(served, monkeypatch):
    """(text, whether it was tokenised on the event loop) of each call."""
    calls, encode = [], served.engine.frontend.tokenizer.encode

    def recorded(text, **options):
        calls.append((text, threading.current_thread() is threading.main_thread()))
        return encode(text, **options)

    monkeypatch.setattr(
        type(served.engine.frontend.tokenizer), "encode", lambda _, text, **options: recorded(text, **options)
    )
    return calls


@pytest.mark.parametrize(("path", "fields"), BODIES.values(), ids=BODIES)
async def test_bad_words_are_tokenised_once_and_off_the_event_loop(served, encoded, path, fields):
    answer = await served.http.post(path, json={**fields, "bad_words": ["foo"], "max_tokens": 1})
    assert answer.status_code == 200
    assert [call for call in encoded if "foo" in call[0]] == [("foo", False), (" foo", False)]
    assert all(request.params.bad_words_token_ids for request in served.engine.requests)


async def test_a_batch_validates_its_shared_fields_once(served, monkeypatch):
    validated, validate = [], ChatCompletionRequest.model_validate
    monkeypatch.setattr(
        ChatCompletionRequest, "model_validate", lambda value: validated.append(value) or validate(value)
    )
    body = {"messages": [TURN] * 5, "allowed_token_ids": [65, 66], "max_tokens": 1}
    assert (await served.http.post("/v1/chat/completions/batch", json=body)).status_code == 200
    assert len(validated) == 1
    assert len({id(request.params.allowed_token_ids) for request in served.engine.requests}) == 1


async def test_other_requests_are_served_while_many_prompts_start(served, monkeypatch):
    generate, turn, starts = served.engine.generate, 0, Counter()

    def count_turns():
        nonlocal turn
        turn += 1
        counting[:] = [asyncio.get_running_loop().call_soon(count_turns)]

    def counted(*given, **options):
        starts[turn] += 1
        return generate(*given, **options)

    counting = []
    count_turns()
    monkeypatch.setattr(served.engine, "generate", counted)
    body = {"prompt": ["a"] * 100, "max_tokens": 1}
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    counting[0].cancel()
    assert sum(starts.values()) == 100
    assert max(starts.values()) == STARTED_AT_ONCE
