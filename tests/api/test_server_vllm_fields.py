"""Request fields and response fields in which vLLM 0.32 and this server must not differ."""

import json

import pytest
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}
CONTEXT = 512


async def post(served, path, **fields):
    return await served.http.post(path, json={**BODIES[path], **fields})


async def chunks(served, path, **fields):
    *frames, done = events((await post(served, path, stream=True, **fields)).text)
    assert done == "[DONE]"
    return [json.loads(frame) for frame in frames]


def assert_refused(answer, param):
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    return error["message"]


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (TEXT, "max_tokens"),
                        (RESPONSES, "max_output_tokens")],
)  # fmt: skip
async def test_an_output_limit_beyond_the_context_is_cut(served, path, field):
    answer = await post(served, path, **{field: 10_000})
    assert answer.status_code == 200, answer.text
    (request,) = served.engine.requests
    assert request.params.max_tokens == CONTEXT - len(request.prompt_token_ids)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize(
    ("generation", "limits"),
    [
        ({"override_generation_config": {"max_new_tokens": 10}}, [5, 10]),
        ({"generation_config": "FOLDER"}, [5, 7]),
        ({"generation_config": "FOLDER", "override_generation_config": {"max_new_tokens": 9}}, [5, 9]),
        ({"generation_config": "vllm"}, [5, 50]),
        ({"generation_config": "auto"}, [5, 50]),
    ],
)
async def test_the_server_s_generation_config_limits_outputs(tmp_path, path, generation, limits):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    config = {name: str(tmp_path) if value == "FOLDER" else value for name, value in generation.items()}
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    async with serving(ScriptedClient(write_byte_model(tmp_path), **config)) as served:
        for asked in (5, 50):
            await post(served, path, **{name: asked})
        assert [request.params.max_tokens for request in served.engine.requests] == limits


async def test_each_prompt_gets_its_own_output_limit(served):
    await post(served, TEXT, prompt=["a", "bcd"], max_tokens=CONTEXT)
    assert {r.params.max_tokens + len(r.prompt_token_ids) for r in served.engine.requests} == {CONTEXT}


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (TEXT, "prompt"), (RESPONSES, "input")])
async def test_a_prompt_beyond_the_context_is_refused(served, path, field):
    text = "x" * (CONTEXT + 1)
    value = [{"role": "user", "content": text}] if path == CHAT else text
    answer = await post(served, path, **{field: value})
    assert answer.status_code == 400
    assert str(CONTEXT) in answer.json()["error"]["message"]


async def test_a_whole_chat_response_has_every_field_of_vllm(served):
    answer = (await post(served, CHAT)).json()
    nulls = {"service_tier", "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params",
             "ec_transfer_params", "metrics"}  # fmt: skip
    assert {name for name, value in answer.items() if value is None} == nulls
    (choice,) = answer["choices"]
    assert {name for name, value in choice.items() if value is None} == {
        *("logprobs", "stop_reason", "token_ids", "routed_experts"),
    }
    assert {name for name, value in choice["message"].items() if value is None} == {
        *("refusal", "annotations", "audio", "function_call", "reasoning"),
    }
    assert answer["usage"]["completion_tokens_details"] is None


async def test_a_whole_completion_has_every_field_of_vllm(served):
    answer = (await post(served, TEXT)).json()
    assert {name for name, value in answer.items() if value is None} == {
        *("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"),
    }
    assert {name for name, value in answer["choices"][0].items() if value is None} == {
        *("logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"),
    }


async def test_chunks_have_the_nulls_of_vllm(served):
    first, *later = await chunks(served, CHAT)
    assert first["prompt_token_ids"] is None
    assert all(chunk["choices"][0]["token_ids"] is None for chunk in later)
    for chunk in await chunks(served, TEXT):
        assert chunk["choices"][0].items() >= {"token_ids": None, "prompt_token_ids": None}.items()
        assert "service_tier" not in chunk


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_forced_usage_is_in_every_chunk(tmp_path, path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), enable_force_include_usage=True) as served:
        counts = [chunk["usage"]["completion_tokens"] for chunk in await chunks(served, path, max_tokens=3)]
    assert counts == ([0] if path == CHAT else []) + [1, 2, 3, 3]


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_the_model_of_an_answer_is_the_first_served_name(tmp_path, path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), served_model_names=("long/name", "short")) as served:
        assert (await post(served, path, model="short")).json()["model"] == "long/name"
        assert (await post(served, path, model="other")).status_code == 404


async def test_minus_one_asks_for_the_logprobs_of_the_whole_vocabulary(served, monkeypatch):
    kind, seen = type(served.engine.frontend), []
    resolve = kind.resolve

    def with_three(frontend, params, **more):
        seen.append(params.logprobs)
        params.logprobs = 3
        return resolve(frontend, params, **more)

    monkeypatch.setattr(kind, "resolve", with_three)
    answer = (await post(served, CHAT, logprobs=True, top_logprobs=-1, max_tokens=1)).json()
    assert (seen, len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"])) == ([-1], 4)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
async def test_a_seed_beyond_64_bits_is_refused(served, path, seed):
    message = assert_refused(await post(served, path, seed=seed), "seed")
    assert str(seed) in message
    assert str(2**63 - 1) in message


async def test_every_wrong_key_of_logit_bias_is_named(served):
    message = assert_refused(await post(served, CHAT, logit_bias={"a": 1, "7": 1, "b": 2}), "logit_bias")
    assert "'a'" in message
    assert "'b'" in message
    assert "'7'" not in message


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"reasoning_effort": "bogus"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "bogus"}}, "reasoning.effort"),
        (CHAT, {"stream_interval": -1}, "stream_interval"),
        (TEXT, {"stream_interval": 0}, "stream_interval"),
        *((path, {"stream_interval": 2**64, "stream": True}, "stream_interval") for path in (CHAT, TEXT)),
        *((path, {name: 2**31}, name) for path in (CHAT, TEXT) for name in ("thinking_token_budget", "top_k")),
        (CHAT, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (TEXT, {"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
        (TEXT, {"truncate_prompt_tokens": 1, "truncation_side": "top"}, "truncation_side"),
    ],
)
async def test_wrong_values_are_refused(served, path, fields, param):
    assert_refused(await post(served, path, **fields), param)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_stream_interval_collects_tokens(served, path):
    sent = await chunks(served, path, stream_interval=3, max_tokens=8, return_token_ids=True)
    ids = [chunk["choices"][0].get("token_ids") for chunk in sent]
    assert [len(found) for found in ids if found] == [1, 3, 3, 1]


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"truncate_prompt_tokens": 3}, b"efg"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": 9}, b"abcdefg"),
        ({"truncate_prompt_tokens": -1}, b"abcdefg"),
    ],
)
async def test_prompts_are_truncated(served, fields, ids):
    answer = await post(served, TEXT, prompt=[*b"abcdefg"], echo=True, max_tokens=1, **fields)
    (request,) = served.engine.requests
    assert bytes(request.prompt_token_ids) == ids
    assert answer.json()["choices"][0]["text"] == ids.decode() + "H"
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)


async def test_a_text_that_is_cut_keeps_the_begin_token_unless_a_side_is_given(tmp_path):
    config = write_byte_model(tmp_path) / "tokenizer_config.json"
    settings = {"bos_token": "<|im_start|>", "add_bos_token": True}
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    async with serving(ScriptedClient(tmp_path)) as served:
        start = served.engine.frontend.tokenizer.bos_token_id
        for side, ids in ((None, [start, *b"fg"]), ("left", [*b"efg"]), ("right", [start, *b"ab"])):
            served.engine.reset()
            await post(served, TEXT, prompt="abcdefg", truncate_prompt_tokens=3, truncation_side=side, max_tokens=1)
            assert served.engine.requests[0].prompt_token_ids == ids, side


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_prompt_beyond_the_context_can_be_truncated(served, path):
    text = "x" * 2 * CONTEXT
    value = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    answer = await post(served, path, truncate_prompt_tokens=-1, **value)
    assert (answer.status_code, answer.json()["usage"]["prompt_tokens"]) == (200, CONTEXT - 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_its_raw_messages_on_request(served, stream):
    answer = await post(served, RESPONSES, enable_response_messages=True, stream=stream)
    last = answer.text.rpartition("data: ")[2]
    response = json.loads(last)["response"] if stream else answer.json()
    (request,) = served.engine.requests
    prompt = served.engine.frontend.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert response["input_messages"] == [
        {"message": prompt, "tokens": request.prompt_token_ids, "type": "raw_message_tokens"}
    ]
    (said,) = response["output_messages"]
    assert bytes(said["tokens"][:-1]).decode() == "Hello, world!"
    assert said["message"].startswith("Hello, world!")
    assert "input_messages" not in (await post(served, RESPONSES)).json()


async def test_a_named_tool_without_arguments_is_not_called(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    tools = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
    async with serving(ScriptedClient(write_byte_model(tmp_path)), tools=tools) as served:
        served.engine.replies = ['{"a": 1}']
        message = (await post(served, CHAT, max_completion_tokens=1, **asked)).json()["choices"][0]["message"]
        assert "tool_calls" not in message
        whole = (await post(served, CHAT, **asked)).json()["choices"][0]["message"]
        assert [call["function"]["arguments"] for call in whole["tool_calls"]] == ['{"a": 1}']


async def test_strict_inside_the_parameters_of_a_tool_is_ignored(served):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "strict": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    served.engine.replies = ['[{"name": "f", "parameters": {"a": 1}}]']
    answer = await post(served, CHAT, tools=[tool], tool_choice="required", model=MODEL)
    assert answer.status_code == 200, answer.text
