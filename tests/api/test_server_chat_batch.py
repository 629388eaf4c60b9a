"""`/v1/chat/completions/batch`: one choice for each conversation."""

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions/batch"


def turns(*texts):
    return [[{"role": "user", "content": text}] for text in texts]


async def test_each_conversation_has_a_choice(served):
    answer = (await served.http.post(PATH, json={"messages": turns("a", "bcd"), "max_tokens": 5})).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "Hello", "length"),
        (1, "Hello", "length"),
    ]
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("chat.completion", 10)
    prompts = [request.prompt_token_ids for request in served.engine.requests]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert len({tuple(ids) for ids in prompts}) == 2


async def test_a_batch_has_the_prompts_of_single_requests(served):
    await served.http.post(PATH, json={"messages": turns("a", "b")})
    for messages in turns("a", "b"):
        await served.http.post("/v1/chat/completions", json={"messages": messages})
    ids = [request.prompt_token_ids for request in served.engine.requests]
    assert sorted(ids[:2]) == sorted(ids[2:])


REFUSED = {
    "no conversations": ({"messages": []}, "messages"),
    "an empty conversation": ({"messages": [[]]}, "messages"),
    "one conversation, not a list": ({"messages": turns("a")[0]}, "messages[0]"),
    "too many": ({"messages": turns("a") * 2000}, "messages"),
    "a stream": ({"stream": True}, "stream"),
    "several choices": ({"n": 2}, "n"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "temperature": ({"temperature": 9}, "temperature"),
    "a message without a role": ({"messages": [[{"content": "a"}]]}, "messages[0].role"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED.keys())
async def test_error_names_the_field(served, fields, param):
    answer = await served.http.post(PATH, json={"messages": turns("a"), **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert served.engine.requests == []
