"""`/v1/completions` through a real uvicorn: forms of prompts, echo, log-probabilities, several choices."""

import json

import pytest
from octavo_engine.wire.hashing import tenant_salt
from octavo_testing.scripted import text_ids, write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, serving
from openai import BadRequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def complete(served, prompt, **fields):
    return await served.openai.completions.create(**{"model": MODEL, "prompt": prompt, **fields})


async def raw_chunks(served, **fields):
    answer = await served.http.post("/v1/completions", json={"stream": True, **fields})
    assert answer.status_code == 200
    return [json.loads(event) for event in events(answer.text)[:-1]]


async def test_plain_response_has_all_fields(served):
    answer = await complete(served, "Say")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("Hello, world!", "stop", None)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.system_fingerprint[:7]) == ("text_completion", "octavo-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 14)


async def test_output_has_sixteen_tokens_by_default(served):
    served.engine.replies = ["x" * 30]
    assert len((await complete(served, "a")).choices[0].text) == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_every_prompt_form_gives_choices_in_order(served, prompt, expected, n):
    served.engine.replies = ["first", "second"][:n]
    answer = await complete(served, prompt, n=n)
    assert sorted(r.prompt_token_ids for r in served.engine.requests) == sorted(expected)
    assert [c.index for c in answer.choices] == list(range(len(expected) * n))
    assert [c.text for c in answer.choices] == served.engine.replies * len(expected)
    assert answer.usage.prompt_tokens == sum(map(len, expected))


async def test_stream_of_several_prompts_has_all_choices(served):
    got = await raw_chunks(served, prompt=["a", "b"], n=2, stream_options={"include_usage": True})
    *others, last = got
    for index in range(4):
        mine = [c["choices"][0] for c in others if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == "Hello, world!"
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 56)


async def test_openai_client_reads_a_stream(served):
    stream = await complete(served, "a", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "Hello, world!"


async def test_echo_puts_the_prompt_before_the_answer(served):
    assert (await complete(served, "Say: ", echo=True)).choices[0].text == "Say: Hello, world!"
    assert (await complete(served, text_ids("Say: "), echo=True)).choices[0].text == "Say: Hello, world!"
    got = await raw_chunks(served, prompt="Say: ", echo=True)
    assert got[0]["choices"][0]["text"] == "Say: H"
    assert "".join(c["choices"][0]["text"] for c in got) == "Say: Hello, world!"


async def test_echo_with_zero_tokens_returns_only_the_prompt(served):
    answer = await complete(served, "Say", echo=True, max_tokens=0, logprobs=0)
    (choice,) = answer.choices
    assert (choice.text, choice.logprobs.tokens, choice.logprobs.token_logprobs) == (
        "Say",
        ["S", "a", "y"],
        [None, -0.3, -0.3],
    )
    assert served.engine.requests[0].params.max_tokens == 1


async def test_logprobs_have_four_columns(served):
    answer = await complete(served, "a", logprobs=2, max_tokens=2)
    columns = answer.choices[0].logprobs
    assert (columns.tokens, columns.token_logprobs, columns.text_offset) == (["H", "e"], [-0.3, -0.3], [0, 1])
    assert columns.top_logprobs[0] == {"H": -0.3, "I": -0.25, "J": -9999.0}


async def test_log_probabilities_count_by_sequences_and_tokens(served, monkeypatch):
    monkeypatch.setattr("octavo_server.openai.limits.MAX_LOGPROBS", 24)
    assert (await complete(served, ["a", "b"], logprobs=2, max_tokens=3, n=2)).usage.completion_tokens == 12
    for fields in ({"max_tokens": 4}, {"n": 3}, {"logprobs": 3}, {"max_tokens": None}):
        with pytest.raises(BadRequestError, match="log-probabilities") as refused:
            await complete(served, ["a", "b"], **({"logprobs": 2, "max_tokens": 3, "n": 2} | fields))
        assert refused.value.param == "logprobs"
    named = {"max_tokens": 3, "n": 2, "logprobs": 0, "extra_body": {"logprob_token_ids": [5, 6]}}
    assert (await complete(served, ["a", "b"], **named)).usage.completion_tokens == 12
    for fields in ({"max_tokens": 4}, {"n": 3}, {"extra_body": {"logprob_token_ids": [5, 6, 7]}}):
        with pytest.raises(BadRequestError, match="logprob_token_ids"):
            await complete(served, ["a", "b"], **(named | fields))


async def test_echoed_logprobs_start_with_null(served):
    columns = (await complete(served, "ab", logprobs=1, echo=True, max_tokens=1)).choices[0].logprobs
    assert columns.tokens == ["a", "b", "H"]
    assert columns.token_logprobs == [None, -0.3, -0.3]
    assert columns.top_logprobs[0] is None
    assert columns.text_offset == [0, 1, 2]


async def test_streamed_logprobs_continue_their_text_offsets(served):
    got = await raw_chunks(served, prompt="ab", logprobs=0, max_tokens=3, echo=True)
    columns = [c["choices"][0]["logprobs"] for c in got]
    assert [t for c in columns for t in c["tokens"]] == ["a", "b", "H", "e", "l"]
    assert [o for c in columns for o in c["text_offset"]] == [0, 1, 2, 3, 4]


async def test_prompt_logprobs_and_ids_are_returned_on_request(served):
    answer = await complete(served, "ab", extra_body={"prompt_logprobs": 1, "return_token_ids": True})
    (choice,) = answer.choices
    assert choice.prompt_logprobs == [
        None,
        {
            "98": {"logprob": -0.3, "rank": 2, "decoded_token": "b"},
            "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
        },
    ]
    assert (choice.prompt_token_ids, choice.token_ids[0]) == ([97, 98], ord("H"))


async def test_tokens_are_written_as_ids_on_request(served):
    answer = await complete(served, "a", logprobs=1, max_tokens=1, extra_body={"return_tokens_as_token_ids": True})
    columns = answer.choices[0].logprobs
    assert (columns.tokens, set(columns.top_logprobs[0])) == (["token_id:72"], {"token_id:72", "token_id:73"})


async def test_best_of_equal_to_n_is_accepted(served):
    assert len((await complete(served, "a", n=2, best_of=2)).choices) == 2


async def test_salt_and_priority_reach_the_engine(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path), scheduling_policy="priority")) as served:
        await complete(served, "a", extra_body={"cache_salt": "mine", "priority": 3})
        (request,) = served.engine.requests
        assert (request.cache_salt, request.priority) == (tenant_salt("", "mine"), 3)
