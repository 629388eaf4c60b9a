"""Times of a request in its response; the scripted engine reports 0.1 s queue, 0.2 s prefill and 0.3 s decode."""

import json

import pytest
from octavo_engine.wire.records import Timing
from octavo_server.openai.answer import RequestTimes, request_times
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    TEXT: {"model": MODEL, "prompt": "x", "max_tokens": 4},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}
TIMES = {
    "time_to_first_token_ms": 200.0,
    "generation_time_ms": 300.0,
    "queue_time_ms": 100.0,
    "mean_itl_ms": 100.0,
    "tokens_per_second": 8.0,
}


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_response_has_times_with_the_flag(tmp_path, path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, enable_per_request_metrics=True) as served:
        assert (await served.http.post(path, json=BODIES[path])).json()["metrics"] == pytest.approx(TIMES)
        streamed = (await served.http.post(path, json={**BODIES[path], "stream": True})).text
    *others, last = [json.loads(event) for event in events(streamed)[:-1]]
    assert last["metrics"] == pytest.approx(TIMES)
    assert last["choices"][0]["finish_reason"] == "length"
    assert not any("metrics" in chunk for chunk in others)


async def test_response_has_no_times_by_default(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        assert (await served.http.post(TEXT, json=BODIES[TEXT])).json()["metrics"] is None


def test_times_that_need_more_tokens_are_null():
    timing = Timing(queue_s=0.5, prefill_s=0.25, decode_s=0.0, inference_s=0.25)
    one = RequestTimes(250.0, 0.0, 500.0, None, 4.0)
    assert request_times(timing, 1) == one
    assert request_times(Timing(queue_s=0.5), 0) == RequestTimes(None, None, 500.0, None, None)
