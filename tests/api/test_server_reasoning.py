"""Reasoning through the whole server: its own fields, streamed or not, counted, hidden or turned off."""

import json

import pytest
import pytest_asyncio
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, events, serving
from openai import BadRequestError

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK = "{% for m in messages %}{{ m.content }}{% endfor %}<|Assistant|><think>\n"
TOOLS = [{"type": "function", "function": {"name": "now", "strict": True}}]
THOUGHT = "<think>\nHm, é.\n</think>\n\nYes."
CALLING = 'Hm.\n</think>\n\nWait.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def serve(folder, parser, template):
    engine = ScriptedClient(write_byte_model(folder), chat_template=template)
    return serving(
        engine, reasoning_parser=parser, tools=ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen_server(tmp_path_factory):
    async with serve(tmp_path_factory.mktemp("qwen"), "qwen3", QWEN) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deepseek_server(tmp_path_factory):
    async with serve(tmp_path_factory.mktemp("deepseek"), "deepseek_r1", DEEPSEEK) as started:
        yield started


@pytest.fixture
def qwen(qwen_server):
    qwen_server.engine.reset()
    qwen_server.engine.replies = [THOUGHT]
    return qwen_server


@pytest.fixture
def deepseek(deepseek_server):
    deepseek_server.engine.reset()
    deepseek_server.engine.replies = [CALLING]
    return deepseek_server


async def ask(served, **fields):
    answer = await served.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(served, **fields):
    """The deltas joined by field, the finish reason, and the fields of each chunk."""
    answer = await served.http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(event)["choices"][0] for event in events(answer.text)[:-1]]
    joined = {}
    for chunk in chunks:
        for name in ("content", "reasoning", "reasoning_content"):
            joined[name] = joined.get(name, "") + chunk["delta"].get(name, "")
    return joined, chunks[-1]["finish_reason"], [chunk["delta"] for chunk in chunks]


async def test_reasoning_has_its_own_fields(qwen):
    body = await ask(qwen)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Hm, é.", "Hm, é.", "Yes.")
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_stream_sends_reasoning_then_the_answer_without_empty_chunks(qwen):
    joined, reason, deltas = await stream(qwen)
    assert joined == {"content": "Yes.", "reasoning": "Hm, é.", "reasoning_content": "Hm, é."}
    assert reason == "stop"
    assert all(delta for delta in deltas[:-1])
    assert [delta for delta in deltas if delta.get("reasoning")] == deltas[1 : 1 + len("Hm, é.")]


@pytest.mark.parametrize("num_first", range(len(THOUGHT.encode()) + 1))
async def test_stream_gives_the_same_result_for_every_split(qwen, num_first):
    qwen.engine.yield_at = frozenset({num_first})
    joined, reason, _ = await stream(qwen)
    assert (joined["content"], joined["reasoning"], reason) == ("Yes.", "Hm, é.", "stop")


async def test_hidden_reasoning_is_not_returned(qwen):
    message = (await ask(qwen, include_reasoning=False))["choices"][0]["message"]
    assert {k: v for k, v in message.items() if v is not None} == {"role": "assistant", "content": "Yes."}
    joined, _, deltas = await stream(qwen, include_reasoning=False)
    assert joined["content"] == "Yes."
    assert not any("reasoning" in delta for delta in deltas)


async def test_reasoning_can_be_turned_off(qwen):
    qwen.engine.replies = ["Yes."]
    message = (await ask(qwen, chat_template_kwargs={"enable_thinking": False}))["choices"][0]["message"]
    assert {k: v for k, v in message.items() if v is not None} == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "is_off"),
    [
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, False),
        ({"reasoning_effort": "high", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, True),
    ],
)
async def test_effort_none_turns_reasoning_off(qwen, fields, is_off, stream):
    """Values of `chat_template_kwargs` win. The parser must agree with the prompt."""
    answer = await qwen.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=stream, **fields)
    parts = [chunk.choices[0].delta async for chunk in answer] if stream else [answer.choices[0].message]
    assert any(getattr(part, "reasoning", None) for part in parts) is not is_off
    prompt = qwen.engine.requests[-1].prompt_token_ids
    assert qwen.engine.frontend.tokenizer.decode(prompt, skip_special_tokens=False).endswith("</think>\n\n") is is_off


async def test_answer_without_reasoning_has_only_text(qwen):
    qwen.engine.replies = ["Yes."]
    message = (await ask(qwen))["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", None)


async def test_reasoning_without_an_end_is_all_reasoning(deepseek):
    deepseek.engine.replies = ["Hm, hm"]
    choice = (await ask(deepseek, max_tokens=4))["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm, ", None)
    assert choice["finish_reason"] == "length"


async def test_reasoning_tokens_are_counted(deepseek):
    usage = (await ask(deepseek))["usage"]
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert num_reasoning == len("Hm.\n</think>")  # each byte is a token; the marker is not a token
    assert usage["completion_tokens"] == len(CALLING) + 1


@pytest.mark.parametrize("num_first", range(0, len(CALLING) + 1, 3))
async def test_calls_may_follow_reasoning(deepseek, num_first):
    deepseek.engine.yield_at = frozenset({num_first})
    request = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
    (plain,) = (await deepseek.openai.chat.completions.create(**request)).choices
    async with deepseek.openai.chat.completions.stream(**request) as answer:
        (choice,) = (await answer.get_final_completion()).choices
    for one in (plain, choice):
        assert (one.message.content, one.message.reasoning) == ("Wait.", "Hm.")
        assert [call.function.name for call in one.message.tool_calls] == ["now"]
        assert one.finish_reason == "tool_calls"


async def test_reasoning_of_earlier_turns_reaches_the_template(qwen):
    reply = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    await ask(qwen, messages=[*HELLO, reply, *HELLO])
    prompt = qwen.engine.prompt_text(0)
    assert "<|im_start|>assistant\n<think>Hm.</think>Yes.<|im_end|>" in prompt


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
async def test_structured_output_starts_after_reasoning_with_token_markers(tmp_path, parser):
    folder = write_byte_model(tmp_path, more_special_tokens=("<think>", "</think>"))
    engine = ScriptedClient(folder, chat_template=QWEN)
    start, end = (engine.frontend.tokenizer.token_id(marker) for marker in ("<think>", "</think>"))
    engine.replies = [engine.frontend.tokenizer.encode('<think>Hm</think>[{"name": "now", "parameters": {}}]')]
    async with serving(engine, reasoning_parser=parser) as served:
        body = await ask(served, tools=TOOLS, tool_choice="required")
    params = engine.requests[0].params
    assert params.structured_outputs is not None
    assert params.reasoning_end_token_id == end
    assert params.reasoning_start_token_id == (start if parser == "qwen3" else None)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["tool_calls"][0]["function"]["name"]) == ("Hm", "now")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
async def test_a_budget_of_reasoning_tokens_is_bounded_by_the_markers(tmp_path, parser):
    folder = write_byte_model(tmp_path, more_special_tokens=("<think>", "</think>"))
    engine = ScriptedClient(folder, chat_template=QWEN)
    start, end = (engine.frontend.tokenizer.token_id(marker) for marker in ("<think>", "</think>"))
    async with serving(engine, reasoning_parser=parser) as served:
        await ask(served, thinking_token_budget=3)
    params = engine.requests[0].params
    assert (params.thinking_token_budget, params.reasoning_end_token_id) == (3, end)
    assert params.reasoning_start_token_id == (start if parser == "qwen3" else None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"thinking_token_budget": 3}}, "thinking_token_budget"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_structured_output_is_rejected_if_markers_are_not_tokens(qwen, fields, param):
    with pytest.raises(BadRequestError) as caught:
        await qwen.openai.chat.completions.create(model=MODEL, messages=HELLO, **fields)
    assert caught.value.param == param
    assert '{"enable_thinking": false}' in caught.value.message
