"""`GET /kv/model`: from the card alone a router computes the tokens and hashes of the server itself."""

import pytest
import pytest_asyncio
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.hashing import block_hashes, scoped_root, unnamed_tenant
from octavo_engine.wire.kv_stream import numbers
from octavo_server.kv.card import read_card
from octavo_server.kv.frames import FrameReader, Part, Step
from octavo_server.output_parsing.tool_use import ToolSettings
from octavo_server.router.prompts.prompt_hasher import PromptHasher
from octavo_testing.chat_shapes import QWEN, TOKENS
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERMES = ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)
KEY = {"Authorization": "Bearer k"}
TENANT = unnamed_tenant("k")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))
    async with serving(engine) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(server):
    answer = await server.http.get("/kv/model")
    assert answer.headers["content-type"] == "application/msgpack"
    return PromptHasher.from_card(read_card(answer.content))


def numbers_of(root, token_ids, block_size):
    return [int.from_bytes(h[:8], "little") for h in block_hashes(root, token_ids, block_size)]


async def test_the_card_describes_the_server(server, reader):
    card = reader.card
    assert card.models == (MODEL,)
    assert (card.root, card.block_size) == (b"scripted", 16)
    assert card.max_model_len == 512
    assert len(card.fingerprint) == 32


BODIES = {
    "chat": ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a question " * 9}]}),
    "completion": ("completion", "/v1/completions", {"prompt": "The quick brown fox. " * 5}),
    "ids": ("completion", "/v1/completions", {"prompt": [*range(40)]}),
    "responses": ("responses", "/v1/responses", {"input": "a question " * 9, "instructions": "be brief"}),
    "truncated": (
        "responses",
        "/v1/responses",
        {"input": [{"role": "user", "content": f"question {i} " * 9} for i in range(9)], "truncation": "auto"},
    ),
    "salted": ("completion", "/v1/completions", {"prompt": "The quick brown fox. " * 5, "cache_salt": "mine"}),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "body"), BODIES.values(), ids=BODIES.keys())
async def test_a_router_hashes_the_prompt_that_the_server_renders(server, reader, kind, path, body):
    rendered = (await server.http.post(path + "/render", json=body)).json()
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    prompt = reader.hash_prompt(kind, body, "")
    root = scoped_root(reader.card.root, "", rendered["cache_salt"] or "")
    assert prompt.is_exact
    assert prompt.num_tokens == len(rendered["token_ids"])
    assert [*prompt.hashes] == numbers_of(root, rendered["token_ids"], 16) != []


SYSTEMS = [{"role": "system", "content": "be brief, " * 9}, {"role": "developer", "content": "be kind, " * 9}]
ASKED = [*SYSTEMS, {"role": "user", "content": [{"type": "text", "text": "a question " * 9}] * 2}]
LOOP = "{% for m in messages %}{{ m.role }}:CONTENT;{% endfor %}"
TEMPLATED = {
    "parts": {"chat_template": LOOP.replace("CONTENT", "{% for part in m.content %}{{ part.text }}|{% endfor %}")},
    "first part": {"chat_template": LOOP.replace("CONTENT", "{{ m.content[0].text }}")},
    "one system": {
        "chat_template": LOOP.replace(
            "CONTENT", "{{ raise_exception('late') if m.role == 'system' and not loop.first }}{{ m.content }}"
        )
    },
    "openai": {"chat_template": LOOP.replace("CONTENT", "{{ m.content }}"), "chat_template_content_format": "openai"},
}


@pytest.mark.parametrize("settings", TEMPLATED.values(), ids=TEMPLATED)
async def test_a_router_renders_each_template_as_the_server_does(tmp_path, settings):
    client = ScriptedClient(write_byte_model(tmp_path), max_model_len=4096, **settings)
    async with serving(client, tools=HERMES) as served:
        reader = PromptHasher.from_card(read_card((await served.http.get("/kv/model")).content))
        for more in ({}, {"tools": [TOOL]}):
            body = {"messages": ASKED, **more}
            rendered = (await served.http.post("/v1/chat/completions/render", json=body)).json()
            hashes = [*reader.hash_prompt("chat", body, "").hashes]
            assert hashes == numbers_of(reader.card.root, rendered["token_ids"], 16) != []
            assert bytes(rendered["token_ids"]).count(b"a question " * 9) == 2
        item = {"role": "developer", "content": [{"type": "input_text", "text": "be kind, " * 9}]}
        body = {"instructions": "be brief, " * 9, "input": [item, {"role": "user", "content": "a question " * 9}]}
        rendered = (await served.http.post("/v1/responses/render", json=body)).json()
        hashes = [*reader.hash_prompt("responses", body, "").hashes]
        assert hashes == numbers_of(reader.card.root, rendered["token_ids"], 16) != []


@pytest.mark.parametrize("chosen", [None, "default", "tool_use"])
async def test_a_router_renders_named_templates_as_the_server_does(tmp_path, chosen):
    """Also with the special tokens that only the template for tools has."""
    folder = write_byte_model(tmp_path, more_special_tokens=TOKENS[-3:])
    (folder / "chat_template.jinja").write_text(LOOP.replace("CONTENT", "{{ m.content }}"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson if tools }}" + QWEN)
    body = {"messages": ASKED, "tools": [TOOL], "tool_choice": "auto"}
    async with serving(ScriptedClient(folder, chat_template=chosen, max_model_len=4096), tools=HERMES) as served:
        reader = PromptHasher.from_card(read_card((await served.http.get("/kv/model")).content))
        texts = []
        for asked in (body, {"messages": ASKED}):
            rendered = (await served.http.post("/v1/chat/completions/render", json=asked)).json()
            hashes = [*reader.hash_prompt("chat", asked, "").hashes]
            assert hashes == numbers_of(reader.card.root, rendered["token_ids"], 16) != []
            tokens = {"tokens": rendered["token_ids"]}
            texts.append((await served.http.post("/detokenize", json=tokens)).json()["prompt"])
    assert ["# Tools" in texts[0], "user:a question" in texts[1]] == [chosen != "default", chosen != "tool_use"]


async def test_the_longest_of_several_prompts_counts(reader):
    prompt = reader.hash_prompt("completion", {"prompt": ["a" * 20, "b" * 70, "c"], "n": 2}, "")
    assert (prompt.num_tokens, len(prompt.hashes), prompt.num_outputs) == (91, 4, 6)


async def test_a_body_that_a_replica_refuses_is_estimated(reader):
    for body in ({"messages": 5}, {"messages": []}, {}, {"messages": [{"role": "user", "content": 7}]}):
        prompt = reader.hash_prompt("chat", body, "")
        assert (prompt.is_exact, prompt.hashes) == (False, ())
        assert prompt.num_tokens > 0


async def test_an_isolated_tenant_has_its_own_hashes(tmp_path):
    body = {"prompt": "The quick brown fox. " * 5}
    keys, admin = tmp_path / "keys", {"Authorization": "Bearer secret"}
    keys.write_text("admin: secret\n")
    settings = {"api_key": ("k",), "api_key_file": (keys,), "cache_isolation": True}
    async with serving(ScriptedClient(write_byte_model(tmp_path)), **settings) as served:
        assert (await served.http.get("/kv/model")).status_code == 401
        reader = PromptHasher.from_card(read_card((await served.http.get("/kv/model", headers=admin)).content))
        (rendered,) = (await served.http.post("/v1/completions/render", json=body, headers=KEY)).json()
    root = scoped_root(reader.card.root, "", rendered["cache_salt"])
    prompt = reader.hash_prompt("completion", body, TENANT)
    assert [*prompt.hashes] == numbers_of(root, rendered["token_ids"], 16)
    assert root != reader.card.root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    """A real scheduler and block pool in an engine core process."""
    folder = write_byte_model(tmp_path_factory.mktemp("model"), more_special_tokens=TOKENS[-3:])
    config = EngineConfig(
        model=str(folder), load_format="dummy", max_model_len=4096, chat_template=QWEN, num_gpu_blocks_override=1024
    )
    with scripted_environment():
        async with running(config) as llm, serving(llm, tools=HERMES) as started:
            yield started


async def stored_since(chunks, frames, wanted):
    """Read the stream until all of `wanted` is stored; return all blocks stored meanwhile."""
    stored = set()
    async for chunk in chunks:
        for frame in frames.feed(chunk):
            if isinstance(frame, Part):
                stored.update(numbers(frame.device))
            elif isinstance(frame, Step):
                stored.update(numbers(frame.stored))
        if wanted <= stored:
            return stored
    raise AssertionError("the stream ended")


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAID = [
    {"role": "system", "content": "You answer briefly and well. " * 8},
    {"role": "user", "content": [{"type": "text", "text": "What is one and one, I would like to know? " * 2}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
    {"role": "user", "content": "And now?"},
]
TURNS = {
    "plain": {"messages": SAID[:1] + SAID[4:]},
    "with parts": {"messages": SAID[:2]},
    "with tools": {"messages": SAID, "tools": [TOOL]},
    "salted": {"messages": SAID[:2], "cache_salt": "mine"},
    "quiet": {"messages": SAID[:2], "chat_template_kwargs": {"enable_thinking": False}},
}


@pytest.mark.parametrize("body", TURNS.values(), ids=TURNS.keys())
async def test_the_engine_stores_and_finds_the_routers_hashes(engine, body):
    reader = PromptHasher.from_card(read_card((await engine.http.get("/kv/model")).content))
    prompt = reader.hash_prompt("chat", body, "")
    wanted = set(prompt.hashes)
    assert prompt.is_exact
    assert len(wanted) > 10
    await engine.http.post("/reset_prefix_cache")
    async with engine.http.stream("GET", "/kv/events") as response:
        answers = [await engine.http.post("/v1/chat/completions", json={**body, "max_tokens": 1}) for _ in range(2)]
        usage = [answer.json()["usage"] for answer in answers]
        stored = await stored_since(response.aiter_raw(), FrameReader(), wanted)
    assert stored == wanted
    assert [one["prompt_tokens"] for one in usage] == [prompt.num_tokens] * 2
    assert usage[0]["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage[1]["prompt_tokens_details"]["cached_tokens"] == min(len(wanted) * 16, prompt.num_tokens - 1)
