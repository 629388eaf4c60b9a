"""Answers that are kept until they are whole count in the memory of request bodies; streamed ones don't."""

import asyncio

import pytest
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving
from openai import BadRequestError

LIMIT = 20_000
PATHS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 400, "logprobs": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 5},
    "/v1/responses": {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 5},
}


@pytest.fixture
async def served(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path), max_model_len=1000, max_logprobs=-1)
    async with serving(engine, max_body_memory=LIMIT) as started:
        yield started


def held_bytes(served):
    return served.server.config.app.state.context.body_budget.num_bytes


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_never_fits_is_a_bad_request(served, path):
    served.engine.replies = ["x" * 400]
    answer = await served.http.post(path, json=PATHS[path])
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"the limit is {LIMIT}" in message
    assert "--max-body-memory" in message
    assert await served.engine.aborted.get()
    assert held_bytes(served) == 0


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_that_fits_later_gets_503(served, path):
    served.engine.replies = ["x" * 40]
    with served.server.config.app.state.context.body_budget.reserve(is_answer=True) as others:
        others.add(LIMIT - 5000)
        answer = await served.http.post(path, json=PATHS[path])
        assert answer.status_code == 503
        message = answer.json()["error"]["message"]
        assert f"limit of {LIMIT} (--max-body-memory). Send the request again later, or stream the answer." in message
    served.engine.replies = ["x"]
    assert (await served.http.post(path, json=PATHS[path])).status_code == 200


async def test_prompt_logprobs_that_never_fit_are_refused_at_once(served):
    """Each position has the log-probabilities of the whole vocabulary."""
    extra = {"prompt_logprobs": -1}
    for create, asked in (
        (served.openai.completions.create, {"prompt": "abc"}),
        (served.openai.chat.completions.create, {"messages": [{"role": "user", "content": "abc"}]}),
    ):
        with pytest.raises(BadRequestError, match="--max-body-memory") as caught:
            await create(model=MODEL, extra_body=extra, **asked)
        assert caught.value.param == "prompt_logprobs"
    assert served.engine.requests == []
    answer = await served.openai.completions.create(model=MODEL, prompt="abc", extra_body={"prompt_logprobs": 2})
    assert [len(position or ()) for position in answer.choices[0].prompt_logprobs] == [0, 3, 3]


@pytest.mark.parametrize("path", PATHS)
async def test_a_streamed_answer_of_any_size_is_whole(served, path):
    served.engine.replies = ["x" * 400]
    answer = await served.http.post(path, json={**PATHS[path], "stream": True})
    assert answer.status_code == 200
    assert "--max-body-memory" not in answer.text
    assert held_bytes(served) == 0


async def test_text_and_messages_count_until_the_answer_is_written(served):
    served.engine.replies = ["x" * 50]
    served.engine.hold_at = 40
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100}
    sent = [asyncio.create_task(served.http.post(path, json=body)) for path in ("/v1/messages", "/v1/chat/completions")]
    await served.engine.held.wait()
    assert held_bytes(served) > 0
    served.engine.resumed.set()
    assert [(await answer).status_code for answer in sent] == [200, 200]
    assert held_bytes(served) == 0
