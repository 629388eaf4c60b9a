"""`use_beam_search` of chat and completion requests.

The scripted engine's likeliest next token is always "I" (-0.25), then the chosen "H" (-0.3), then "J" (-0.5).
"""

import asyncio

import pytest
import pytest_asyncio
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving
from openai import BadRequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 3}


@pytest_asyncio.fixture(loop_scope="module")
async def served(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as started:
        yield started


def texts(answer):
    return [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]


@pytest.mark.parametrize("path", BODIES)
async def test_the_likeliest_outputs_are_returned(served, path):
    answer = await served.http.post(path, json={**BODIES[path], **BEAMS})
    assert answer.status_code == 200, answer.text
    first, second = texts(answer.json())
    assert (first, sorted(second)) == ("III", [*"HII"])
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length", "length"]
    assert answer.json()["usage"]["completion_tokens"] == 6
    metrics = await served.metrics()
    assert metrics["vllm:request_generation_tokens_sum"] == 6
    assert served.engine.running == set()


async def test_an_end_token_completes_a_beam(served):
    served.engine.replies = [""]
    answer = (await served.http.post(TEXT, json={**BODIES[TEXT], **BEAMS, "length_penalty": 0.0})).json()
    assert texts(answer)[0] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_each_prompt_has_its_beams(served):
    answer = (await served.http.post(TEXT, json={"prompt": ["a", "b"], **BEAMS, "echo": True})).json()
    assert [text[:2] for text in texts(answer)[::2]] == ["aI", "bI"]
    assert len(answer["choices"]) == 4


async def test_logprobs_are_those_of_the_beam(served):
    answer = (await served.http.post(TEXT, json={**BODIES[TEXT], **BEAMS, "logprobs": 1})).json()
    assert answer["choices"][0]["logprobs"]["tokens"] == ["I"] * 3
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.25] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"n": 11}, "logprobs"),
        ({"length_penalty": 1e308}, "length_penalty"),
        ({"length_penalty": -1e308}, "length_penalty"),
    ],
)
async def test_impossible_searches_are_refused(served, fields, param):
    answer = await served.http.post(TEXT, json={**BODIES[TEXT], **BEAMS, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("temperature", [0, 1e-6, 0.5, None])
async def test_beams_differ_at_any_temperature(served, temperature):
    """A plain request of temperature 0 may not ask for two outputs, since they would be equal."""
    fields = {"model": MODEL, "n": 2, "max_tokens": 3, "temperature": temperature}
    extra = {"use_beam_search": True}
    chat = await served.openai.chat.completions.create(messages=BODIES[CHAT]["messages"], extra_body=extra, **fields)
    text = await served.openai.completions.create(prompt="hi", extra_body=extra, **fields)
    assert [choice.message.content for choice in chat.choices] == [choice.text for choice in text.choices]
    assert len({choice.text for choice in text.choices}) == 2
    if temperature in (0, 1e-6):
        with pytest.raises(BadRequestError) as caught:
            await served.openai.completions.create(prompt="hi", **fields)
        assert caught.value.param == "n"


@pytest.mark.parametrize(("fields", "param"), [({"n": 0}, "n"), ({"n": -1}, "n"), ({"temperature": -1}, "temperature")])
async def test_impossible_beams_at_temperature_zero_are_refused(served, fields, param):
    answer = await served.http.post(TEXT, json={**BODIES[TEXT], **BEAMS, "temperature": 0, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("fields", "status"), [({}, 200), ({"logprobs": 1}, 400)])
async def test_the_memory_of_beams_counts_in_the_budget_of_bodies(tmp_path, fields, status):
    """A step holds two beams of up to 300 tokens, with four log-probabilities at each position if they are wanted."""
    async with serving(ScriptedClient(write_byte_model(tmp_path)), max_body_memory=2**17) as served:
        answer = await served.http.post(TEXT, json={**BODIES[TEXT], **BEAMS, "max_tokens": 300, **fields})
        assert answer.status_code == status
        assert served.server._context.body_budget.num_bytes == 0
        assert len(served.engine.requests) < 600 or status == 200


async def test_a_failed_step_is_an_error(served):
    served.engine.fail_at = 0
    answer = await served.http.post(TEXT, json={**BODIES[TEXT], **BEAMS})
    assert answer.status_code == 500
    assert served.engine.running == set()


async def test_a_disconnect_aborts_all_beams(served):
    served.engine.hold_at = 0
    request = asyncio.create_task(served.http.post(TEXT, json={**BODIES[TEXT], **BEAMS}))
    await served.engine.held.wait()
    request.cancel()
    assert await served.engine.aborted.get()
    assert served.engine.running == set()
