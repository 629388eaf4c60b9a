"""The render endpoints return what the generating endpoints send to the engine: ids, limits, salt and errors."""

import pytest
import pytest_asyncio
from octavo_engine.wire.hashing import tenant_salt
from octavo_testing.scripted import text_ids, write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")), scheduling_policy="priority")
    async with serving(engine) as started:
        yield started


async def post(served, path, body, status=200):
    answer = await served.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


CONVERSATIONS = {
    "plain": {"messages": HELLO},
    "parts and null": {"messages": [{"role": "system", "content": None}, {"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    "continued": {"messages": [*HELLO, {"role": "assistant", "content": "So"}], "continue_final_message": True,
                  "add_generation_prompt": False},
    "not prompted": {"messages": HELLO, "add_generation_prompt": False},
    "special tokens": {"messages": HELLO, "add_special_tokens": True},
}  # fmt: skip


@pytest.mark.parametrize("body", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
async def test_rendered_conversation_is_the_input_of_the_engine(served, body):
    rendered = await post(served, CHAT + "/render", body)
    assert served.engine.requests == []
    answer = await post(served, CHAT, body)
    assert rendered["token_ids"] == served.engine.requests[0].prompt_token_ids
    assert len(rendered["token_ids"]) == answer["usage"]["prompt_tokens"]
    assert rendered["token_ids"] == (await post(served, "/tokenize", body))["tokens"]
    assert rendered["model"] == MODEL
    assert rendered["request_id"].startswith("chatcmpl-")


@pytest.mark.parametrize(
    "prompt", ["ab", ["ab", "c"], [97, 98], [[97], [98, 99]]], ids=["text", "texts", "ids", "lists of ids"]
)
async def test_each_rendered_prompt_is_the_input_of_the_engine(served, prompt):
    rendered = await post(served, TEXT + "/render", {"prompt": prompt})
    answer = await post(served, TEXT, {"prompt": prompt})
    fed = sorted(request.prompt_token_ids for request in served.engine.requests)
    assert sorted(one["token_ids"] for one in rendered) == fed
    assert sum(len(one["token_ids"]) for one in rendered) == answer["usage"]["prompt_tokens"]
    assert len({one["request_id"] for one in rendered}) == len(rendered)


async def test_a_rendered_message_is_the_input_of_the_engine(served):
    body = {"messages": HELLO, "system": "Be kind.", "max_tokens": 9, "stop_sequences": ["!"], "cache_salt": "mine"}
    rendered = await post(served, "/v1/messages/render", body)
    assert served.engine.requests == []
    await post(served, "/v1/messages", body)
    (request,) = served.engine.requests
    assert (rendered["token_ids"], rendered["cache_salt"]) == (request.prompt_token_ids, request.cache_salt)
    assert (rendered["sampling_params"]["max_tokens"], rendered["sampling_params"]["stop"]) == (9, ["!"])
    assert rendered["request_id"].startswith("msg_")


@pytest.mark.parametrize("body", [{"messages": HELLO}, {"messages": HELLO, "max_tokens": 1, "model": "gpt-x"}])
async def test_rendering_a_message_rejects_with_anthropics_errors(served, body):
    rendered, answered = [await served.http.post(path, json=body) for path in ("/v1/messages/render", "/v1/messages")]
    assert (rendered.status_code, rendered.json()) == (answered.status_code, answered.json())
    assert rendered.json()["type"] == "error"


async def test_rendered_text_has_the_tokens_of_tokenize(served):
    (rendered,) = await post(served, TEXT + "/render", {"prompt": "hé"})
    assert rendered["token_ids"] == (await post(served, "/tokenize", {"prompt": "hé"}))["tokens"] == text_ids("hé")
    assert rendered["prompt"] == "hé"


async def test_rendered_parameters_are_the_resolved_ones(served):
    asked = {"temperature": 0.5, "seed": 7, "stop": ["x"], "cache_salt": "mine", "priority": 3, "stream": True}
    rendered = await post(served, CHAT + "/render", {"messages": HELLO, **asked})
    await served.http.post(CHAT, json={"messages": HELLO, **asked})
    (request,) = served.engine.requests
    shown = rendered["sampling_params"]
    for name in ("temperature", "seed", "stop", "max_tokens", "n", "top_p", "stop_token_ids"):
        assert shown[name] == getattr(request.params, name), name
    assert shown["max_tokens"] == 512 - len(rendered["token_ids"])
    assert (rendered["cache_salt"], rendered["priority"]) == (request.cache_salt, request.priority)
    assert (request.cache_salt, request.priority) == (tenant_salt("", "mine"), 3)
    assert rendered["stream"] is True


async def test_rendering_sets_no_seed_and_counts_no_request(tmp_path):
    seeds = []
    for renders in (0, 3):
        async with serving(ScriptedClient(write_byte_model(tmp_path), seed=0)) as served:
            for _ in range(renders):
                (rendered,) = await post(served, TEXT + "/render", {"prompt": "a"})
                assert rendered["sampling_params"]["seed"] is None
            metrics = await served.metrics()
            assert metrics["vllm:request_params_n_count"] == 0
            await post(served, TEXT, {"prompt": "a"})
            seeds.append(served.engine.requests[0].params.seed)
    assert seeds[0] == seeds[1]


async def test_rendered_salt_depends_on_the_api_key(tmp_path):
    salts = []
    async with serving(ScriptedClient(write_byte_model(tmp_path)), api_key=("k",), cache_isolation=True) as served:
        for path in (TEXT + "/render", TEXT):
            body = {"prompt": "a", "cache_salt": "own"}
            answer = await served.http.post(path, json=body, headers={"Authorization": "Bearer k"})
            assert answer.status_code == 200
            salts.append(answer.json()[0]["cache_salt"] if path != TEXT else served.engine.requests[0].cache_salt)
    assert salts[0] == salts[1] != "own"


REFUSED = {
    "model": (TEXT, {"prompt": "a", "model": "gpt-x"}, 404),
    "empty prompt": (TEXT, {"prompt": ""}, 400),
    "no such token": (TEXT, {"prompt": [100_000]}, 400),
    "too long": (TEXT, {"prompt": "a" * 600}, 400),
    "no output": (CHAT, {"messages": HELLO, "max_tokens": 0}, 400),
    "a value out of range": (CHAT, {"messages": HELLO, "temperature": 3}, 400),
    "no messages": (CHAT, {"messages": []}, 400),
    "ill-typed": (CHAT, {"messages": 5}, 400),
}


@pytest.mark.parametrize(("path", "body", "status"), REFUSED.values(), ids=REFUSED.keys())
async def test_rendering_rejects_with_the_errors_of_generation(served, path, body, status):
    error = await post(served, path + "/render", body, status)
    assert error == await post(served, path, body, status)
    assert served.engine.requests == []


@pytest.mark.parametrize("path", [CHAT, CHAT + "/render", "/tokenize"])
async def test_a_call_without_text_cannot_be_continued(tmp_path, path):
    template = "{% for m in messages %}{% if m.content is none %}calls{% else %}{{ m.content }}{% endif %}{% endfor %}"
    calls = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    last = {"role": "assistant", "content": None, "tool_calls": calls}
    body = {"messages": [*HELLO, last], "continue_final_message": True, "add_generation_prompt": False}
    async with serving(ScriptedClient(write_byte_model(tmp_path), chat_template=template)) as started:
        refused = await post(started, path, body, status=400)
    assert refused["error"]["param"] == "messages[1].content"
