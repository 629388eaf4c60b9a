"""The router's block hashes equal those that the engine stores, whatever the template, tokenizer, tools and salts.

The engine's side is its own code: the body is read by the API's schema, rendered and encoded whole, and a real
scheduler stores the blocks. The router's side is a `PromptHasher` that has read many other prompts before.
"""

import functools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.text.template import ChatTemplate
from octavo_engine.wire.hashing import root_hash, tenant_salt
from octavo_engine.wire.kv_stream import numbers
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_server.anthropic.messages import MessagesRequest
from octavo_server.kv.card import KVModelCard, read_card, write_card
from octavo_server.openai.chat import ChatCompletionRequest
from octavo_server.openai.completion import CompletionRequest
from octavo_server.openai.rendering import render_conversation, render_options, without_oldest
from octavo_server.openai.responses import ResponsesRequest
from octavo_server.router.prompts.prompt_hasher import PromptHasher
from octavo_testing.chat_shapes import SPECIAL, TEMPLATES, TOKENIZERS, TOKENS
from octavo_testing.simulation import Simulation, sim_config

BLOCK = 4
ROOT = root_hash("weights", "float32", BLOCK)
ADAPTERS = {"tuned": "sha256:1", "other": "sha256:2"}
CONTEXT = 1 << 20  # more than the longest conversation that can be drawn


@functools.cache
def tokenizer_of(name):
    return TOKENIZERS[name]()


@functools.cache
def template_of(name, content_format):
    return ChatTemplate(TEMPLATES[name], SPECIAL, content_format=content_format)


@functools.cache
def reader_of(tokenizer_name, template_name, isolated, content_format, context):
    """Hasher of a card that was encoded and decoded."""
    tokenizer, template = tokenizer_of(tokenizer_name), template_of(template_name, content_format)
    card = KVModelCard(
        models=("m",),
        root=ROOT,
        block_size=BLOCK,
        max_model_len=context,
        tokenizer=tokenizer.to_json(),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        chat_template=template.source,
        chat_template_content_format=content_format,
        special_tokens=template.special_tokens,
        cache_isolation=isolated,
    )
    return PromptHasher.from_card(read_card(write_card(card)))


def stored(token_ids, salt, adapter):
    """Hashes that a replica's KV stream reports after the prompt has run."""
    config = sim_config(
        block_size=BLOCK,
        num_blocks=len(token_ids) // BLOCK + 2,
        max_model_len=CONTEXT + 1,
        max_num_batched_tokens=CONTEXT,
        hash_root=ROOT,
        debug_invariants=False,
    )
    simulation = Simulation(scheduler=Scheduler(config, kv_events=True))
    request = EngineRequest(
        request_id="r", prompt_token_ids=token_ids, params=SamplingParams(max_tokens=1, temperature=0.0),
        cache_salt=salt, adapter=adapter,
    )  # fmt: skip
    simulation.scheduler.add(request, 0.0)
    plan = simulation.scheduler.step(1.0, simulation.costs)
    simulation.scheduler.commit(simulation.executor.run(plan), 2.0)
    change = simulation.scheduler.take_kv_delta().change()
    return set(numbers(change.stored)) if change else set()


def engine_prompts(kind, raw, template, tokenizer, context):
    if kind == "completion":
        body = CompletionRequest.model_validate_json(raw)
        body.check()
        special = True if body.add_special_tokens is None else body.add_special_tokens
        prompts = body.prompts()
        return [tokenizer.encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in prompts]
    if kind == "chat":
        body = ChatCompletionRequest.model_validate_json(raw)
    else:
        asked = {"responses": ResponsesRequest, "messages": MessagesRequest}[kind].model_validate_json(raw)
        asked.check()
        body = asked.as_chat()
    body.check()

    def prompt_of(chat):
        text = render_conversation(template, chat.conversation(), render_options(chat))
        return tokenizer.encode(text, add_special_tokens=bool(chat.add_special_tokens))

    if kind == "responses" and asked.truncation == "auto":
        body = without_oldest(body, lambda chat: len(prompt_of(chat)), context)
    return [prompt_of(body)]


def check(kind, body, **place):
    check_raw(kind, json.dumps(body).encode(), **place)


def check_raw(
    kind, raw, *, tokenizer="byte level", template="chatml", tenant="", isolated=False, form="auto", context=CONTEXT
):
    """Compare the proxy's decoding of a body with the engine's."""
    body = msgspec.json.decode(raw)
    prompts = engine_prompts(kind, raw, template_of(template, form), tokenizer_of(tokenizer), context)
    salt = tenant_salt(tenant if isolated else "", body.get("cache_salt") or "")
    longest = max(prompts, key=len)
    if len(longest) >= context:
        return  # the engine refuses it
    adapter = ADAPTERS.get(body.get("model"), "")
    prompt = reader_of(tokenizer, template, isolated, form, context).hash_prompt(kind, body, tenant, adapter=adapter)
    assert prompt.is_exact
    assert prompt.num_tokens == sum(map(len, prompts))
    assert len(prompt.hashes) == len(longest) // BLOCK
    assert set(prompt.hashes) == stored(longest, salt, adapter)


FRAGMENTS = (
    *(
        "a",
        "b",
        " ",
        "  ",
        "\n",
        "\n\n",
        "é",
        "e\u0301",
        "日",
        "1",
        "23",
        ".",
        "'s",
        "\t",
        "ab a",
        "word and more words ",
    ),
    *TOKENS,
    *("<|im_start", "<|im_end|>\n", "<think>", "\ue0f0"),
)
TEXT = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
LONG = st.tuples(st.sampled_from(FRAGMENTS), st.integers(1, 90), TEXT).map(lambda t: f"{t[0]} a b" * t[1] + t[2])
CONTENT = TEXT | LONG
PARTS = st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXT) | TEXT, max_size=3)
CALLS = st.lists(
    st.builds(
        lambda arguments: {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}},
        st.sampled_from(['{"a": 1, "b": null}', "{}", '{"é": [1.0, "x"]}', "3"]),
    ),
    max_size=2,
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
PLAIN = st.fixed_dictionaries({"role": ROLES, "content": CONTENT})
SWAPPED = st.builds(lambda content, role: {"content": content, "role": role}, TEXT, ROLES)
ODD = st.fixed_dictionaries(
    {"role": ROLES, "content": PARTS | TEXT | st.none()},
    optional={
        "tool_calls": CALLS | st.none(), "name": TEXT, "reasoning": TEXT, "tool_call_id": st.just("c"),
        "extra": st.none() | st.integers() | TEXT,
    },
)  # fmt: skip
MESSAGES = st.lists(PLAIN | PLAIN | SWAPPED | ODD, min_size=1, max_size=6)
TOOL = {"type": "function", "function": {"name": "add", "description": None, "parameters": {"type": "object"}}}
ODD_TOOL = {"function": {"name": "b", "strict": True, "extra": [1.5, None], "parameters": {"a": None}}, "more": None}
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([None, [], [TOOL], [TOOL, ODD_TOOL]]),
        "tool_choice": st.sampled_from([None, "none", "auto", {"type": "function", "function": {"name": "add"}}]),
        "add_generation_prompt": st.sampled_from([None, True, False, "false"]),
        "add_special_tokens": st.sampled_from([None, True, False]),
        "chat_template_kwargs": st.sampled_from([None, {}, {"enable_thinking": False}, {"bos_token": "x"}]),
        "reasoning_effort": st.sampled_from([None, "none", "low", "max"]),
        "documents": st.sampled_from([None, [], [{"title": "t"}]]),
        "cache_salt": st.sampled_from([None, "s", "é"]),
        "model": st.sampled_from([None, "m", *ADAPTERS]),
        "max_tokens": st.just(5),
    },
)
PLACE = st.fixed_dictionaries(
    {"tokenizer": st.sampled_from([*TOKENIZERS]), "template": st.sampled_from([*TEMPLATES])},
    optional={"tenant": st.sampled_from(["alice", "bob"]), "isolated": st.booleans()},
)


@given(messages=MESSAGES, options=OPTIONS, place=PLACE)
def test_each_turn_has_the_hashes_that_the_engine_stores(messages, options, place):
    for turn in range(1, len(messages) + 1):
        check("chat", {"messages": messages[:turn], **options}, **place)


@given(messages=MESSAGES, last=TEXT, place=PLACE)
def test_a_continued_answer_has_the_engines_hashes(messages, last, place):
    spoken = [*messages, {"role": "assistant", "content": "so" + last}]
    if place["template"] not in ("printed", "qwen"):
        check("chat", {"messages": spoken, "continue_final_message": True}, **place)


@given(messages=st.lists(PLAIN, min_size=1, max_size=5), place=PLACE, cut=st.integers(0, 200))
def test_diverging_conversations_have_the_engines_hashes(messages, place, cut):
    check("chat", {"messages": messages}, **place)
    for other in (*messages[:-1], {"role": "user", "content": messages[-1]["content"][:cut] + "b a"}), messages[1:]:
        if other:
            check("chat", {"messages": [*other]}, **place)


PROMPTS = (
    CONTENT.filter(bool)
    | st.lists(st.integers(0, 200), min_size=1, max_size=20)
    | st.lists(CONTENT.filter(bool), min_size=1, max_size=3)
    | st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=9), min_size=1, max_size=3)
)


@given(prompt=PROMPTS, special=st.sampled_from([None, True, False]), place=PLACE, salt=st.sampled_from([None, "s"]))
def test_text_and_id_prompts_have_the_engines_hashes(prompt, special, place, salt):
    check("completion", {"prompt": prompt, "add_special_tokens": special, "cache_salt": salt}, **place)


ITEM = (
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": TEXT})
    | st.builds(lambda t: {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t}]}, TEXT)
    | st.just({"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'})
    | st.builds(lambda t: {"type": "function_call_output", "call_id": "c", "output": t}, TEXT)
)


@given(
    given_input=TEXT.filter(bool) | st.lists(ITEM, min_size=1, max_size=5),
    place=PLACE,
    fields=st.fixed_dictionaries(
        {},
        optional={
            "instructions": TEXT,
            "reasoning": st.sampled_from([None, {"effort": "low"}]),
            "tools": st.just([{"type": "function", "name": "add", "parameters": {"type": "object"}}]),
        },
    ),
)
def test_responses_have_the_engines_hashes(given_input, place, fields):
    check("responses", {"input": given_input, **fields}, **place)


@given(
    items=st.lists(ITEM, min_size=1, max_size=9),
    place=PLACE,
    context=st.integers(1, 90),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "instructions": TEXT,
            "reasoning": st.just({"effort": "low"}),
            "max_output_tokens": st.integers(1, 90),
        },
    ),
)
def test_truncated_responses_have_the_engines_hashes(items, place, context, fields):
    check("responses", {"input": items, "truncation": "auto", **fields}, context=context, **place)


BLOCKS = st.lists(st.builds(lambda t: {"type": "text", "text": t}, TEXT), max_size=3)
TURN = (
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), TEXT)
    | st.builds(lambda content: {"role": "user", "content": content}, BLOCKS)
    | st.just({"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]})
    | st.builds(
        lambda t: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": t}]}, TEXT
    )
)


@given(
    turns=st.lists(TURN, max_size=4).map(lambda turns: [*turns, {"role": "user", "content": "go"}]),
    place=PLACE,
    fields=st.fixed_dictionaries(
        {},
        optional={
            "system": TEXT | BLOCKS,
            "cache_salt": st.just("mine"),
            "tools": st.just([{"name": "add", "input_schema": {"type": "object"}}]),
        },
    ),
)
def test_messages_have_the_engines_hashes(turns, place, fields):
    check("messages", {"messages": turns, "max_tokens": 9, **fields}, **place)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_long_conversation_turn_by_turn(tokenizer, template):
    """Long enough to be cut, in every combination, with a mostly known beginning."""
    messages = []
    for turn in range(4):
        messages.append(
            {"role": ("user", "assistant")[turn % 2], "content": f"word a b {turn} ab. And more words " * 24}
        )
        check("chat", {"messages": messages}, tokenizer=tokenizer, template=template)


@pytest.mark.parametrize("template", ["counted", "printed", "parts"])
@pytest.mark.parametrize("form", ["auto", "string", "openai"])
def test_content_in_each_format_has_the_engines_hashes(template, form):
    parts = [{"type": "text", "text": "word a b"}, {"type": "input_text", "text": "ab"}]
    for content in ("word a b", parts, [], None):
        messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
        check("chat", {"messages": messages}, template=template, form=form)


SPELLINGS = (
    *(
        "-0",
        "-0.0",
        "1E2",
        "1e-7",
        "0.1",
        "1e22",
        "123456789012345678901234567890",
        "9007199254740993.0",
        "5e-324",
        "4.35",
    ),
    *(r'"\ud83d\ude00"', r'"a\u0000b\/"', '{"a":1,"b":2,"a":3}', "[null,true]", '"\u2028\x7f"'),
)


@pytest.mark.parametrize("value", SPELLINGS)
def test_values_in_any_spelling_have_the_engines_hashes(value):
    raw = f'{{"documents":[{value}],"messages":[{{"role":"user","content":"a","x":{value}}}]}}'.encode()
    for template in ("counted", "printed"):
        check_raw("chat", raw, template=template)
