"""`/v1/embeddings` on a tiny embedding model in an engine process: forms of `input`, options, bad input, routes."""

import asyncio
import base64
import os
import signal
import struct
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig
from octavo_testing.core_process import running
from octavo_testing.embedders import cosines, make_embedder, pooled_rows
from octavo_testing.server import MODEL, serving
from octavo_testing.tiny_models import VOCAB, byte_tokenizer
from openai import BadRequestError, NotFoundError

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["one", "two texts", "three", "three and more"]
LENGTH = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_embedder("qwen3", tmp_path_factory.mktemp("model"), is_matryoshka=True, matryoshka_dimensions=[16, 32])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(folder):
    config = EngineConfig(
        model=str(folder), runner="pooling", dtype="float32", max_model_len=LENGTH, num_gpu_blocks_override=200
    )
    async with running(config, DEFAULT_LOADER) as llm, serving(llm) as server:
        yield server


def ids_of(text):
    return byte_tokenizer().encode(text).ids


@pytest.fixture(scope="module")
def expected(folder):
    rows = pooled_rows(folder, [ids_of(text) for text in TEXTS])
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


async def embed(served, given, **fields):
    return await served.openai.embeddings.create(model=MODEL, input=given, **fields)


async def refused(served, **body):
    answer = await served.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_vectors_follow_the_texts(served, expected):
    answer = await embed(served, TEXTS, encoding_format="float")
    assert (answer.object, answer.model) == ("list", MODEL)
    assert [(entry.index, entry.object) for entry in answer.data] == [(i, "embedding") for i in range(len(TEXTS))]
    assert cosines(np.array([entry.embedding for entry in answer.data]), expected).min() > 0.99999
    num_tokens = sum(len(ids_of(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


@pytest.mark.parametrize("as_ids", [False, True], ids=["texts", "ids"])
@pytest.mark.parametrize("is_list", [False, True], ids=["one", "list"])
async def test_every_form_of_input(served, expected, as_ids, is_list):
    given = [ids_of(text) for text in TEXTS] if as_ids else TEXTS
    answer = await embed(served, given if is_list else given[0])  # the client asks for base64 by default
    count = len(TEXTS) if is_list else 1
    assert cosines(np.array([entry.embedding for entry in answer.data]), expected[:count]).min() > 0.99999


async def test_base64_is_little_endian_float32(served, expected):
    answer = await served.http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"})
    vector = struct.unpack("<64f", base64.b64decode(answer.json()["data"][0]["embedding"]))
    assert cosines(np.array(vector), expected[0]) > 0.99999
    assert "x-octavo-cached-tokens" in answer.headers


async def test_dimensions_cut_and_normalise(served, expected):
    vector = np.array((await embed(served, TEXTS[0], dimensions=16)).data[0].embedding)
    assert vector.shape == (16,)
    assert np.allclose(vector, expected[0, :16] / np.linalg.norm(expected[0, :16]), atol=1e-5)


async def test_three_hundred_texts(served):
    texts = [f"text number {i}" for i in range(300)]
    answer = await embed(served, texts)
    again = await embed(served, texts[::-1])
    assert [entry.index for entry in answer.data] == list(range(300))
    vectors = [np.array([entry.embedding for entry in each.data]) for each in (answer, again)]
    assert cosines(vectors[0], vectors[1][::-1]).min() > 0.99999


async def test_text_may_fill_the_context(served):
    assert (await embed(served, [[5] * LENGTH])).usage.prompt_tokens == LENGTH


@pytest.mark.parametrize(
    ("side", "kept"),
    [({}, slice(10)), ({"truncation_side": "left"}, slice(-10, None)), ({"truncation_side": "right"}, slice(10))],
)
async def test_truncation(served, side, kept):
    ids = [3 + i for i in range(200)]
    cut = await embed(served, [ids], extra_body={"truncate_prompt_tokens": 10, **side})
    whole = await embed(served, [ids[kept]])
    assert cut.usage.prompt_tokens == 10
    assert np.allclose(cut.data[0].embedding, whole.data[0].embedding, atol=1e-5)
    everything = await embed(served, [ids], extra_body={"truncate_prompt_tokens": -1, **side})
    assert everything.usage.prompt_tokens == LENGTH


async def test_a_text_that_is_cut_keeps_the_end_token_whose_row_is_its_vector(served, tmp_path):
    folder = make_embedder("qwen3", tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "add_eos_token": true}')
    config = replace(served.engine.config, model=str(folder))
    text, end = "x" * 300 + "y" * 300, byte_tokenizer().token_to_id("</s>")
    first = [*ids_of("x" * 9), end]
    expected = {None: first, "right": ids_of("x" * 10), "left": [*ids_of("y" * 9), end]}
    async with running(config, DEFAULT_LOADER) as llm, serving(llm) as server:
        for side, ids in expected.items():
            fields = {"truncate_prompt_tokens": 10, "truncation_side": side}
            cut = await embed(server, text, extra_body=fields)
            whole = await embed(server, [ids])
            assert np.allclose(cut.data[0].embedding, whole.data[0].embedding, atol=1e-5), side
        body = {"truncate_prompt_tokens": 10, "text_1": text, "text_2": "x" * 9}
        answer = await server.http.post("/score", json=body)
        assert answer.json()["data"][0]["score"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
async def test_vectors_have_length_one_unless_a_request_wants_the_row(served, folder, name):
    (row,) = pooled_rows(folder, [ids_of(TEXTS[0])])
    for value, vector in ((False, row), (True, row / np.linalg.norm(row)), (None, row / np.linalg.norm(row))):
        answer = await embed(served, TEXTS[0], extra_body={name: value})
        assert np.allclose(answer.data[0].embedding, vector, atol=1e-3), value


@pytest.mark.parametrize(
    ("body", "param", "parts"),
    [
        ({"input": ""}, "input", ["empty"]),
        ({"input": []}, "input", ["empty"]),
        ({"input": ["a", ""]}, "input[1]", ["empty"]),
        ({"input": [[5], []]}, "input[1]", ["empty"]),
        ({"input": ["a"] * 299 + ["b" * (LENGTH + 1)]}, "input[299]", [str(LENGTH), str(LENGTH + 1)]),
        ({"input": [5, VOCAB]}, "input", [str(VOCAB)]),
        ({"input": [[5], [-1]]}, "input[1]", ["-1", str(VOCAB)]),
        ({"input": ["a", "b" * 10_000]}, "input[1]", [str(LENGTH)]),
        ({"input": ["a"] * 5000}, "input", ["5000", "--max-messages"]),
        ({"input": "a", "dimensions": 20}, "dimensions", ["20", "16, 32"]),
        ({"input": "a", "dimensions": 0}, "dimensions", ["1"]),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", ["float", "base64"]),
        ({"input": "a", "stream": True}, "stream", []),
        ({"input": "a", "n": 2}, "n", []),
        ({"input": "a", "logprobs": 1}, "logprobs", []),
        ({"input": "a", "tools": [{}]}, "tools", []),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", []),
        ({"input": "a", "truncate_prompt_tokens": 200}, "truncate_prompt_tokens", ["200", str(LENGTH)]),
        ({"input": "a", "use_activation": 3}, "use_activation", []),
        ({"input": "a", "use_activation": True, "normalize": False}, "use_activation", ["normalize"]),
        ({"input": "a", "priority": 1}, "priority", ["--scheduling-policy"]),
        ({"input": "a", "cache_salt": ""}, "cache_salt", []),
        ({}, "input", []),
    ],
)
async def test_bad_input_names_field_value_and_limit(served, body, param, parts):
    before = served.engine.stats.received
    error = await refused(served, **body)
    assert error["param"] == param
    assert all(part in error["message"] for part in parts), error["message"]
    assert served.engine.stats.received == before


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/invocations",
        "/v1/completions/render",
    ],
)
async def test_routes_of_text_name_the_route_of_vectors(served, path):
    answer = await served.http.post(path, json={"prompt": "a", "messages": [], "input": "a"})
    assert answer.status_code == 404
    assert "/v1/embeddings" in answer.text
    assert path not in (await served.http.get("/openapi.json")).json()["paths"]


async def test_chat_of_the_client_library(served):
    with pytest.raises(NotFoundError, match="/v1/embeddings"):
        await served.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])


async def test_client_that_leaves_frees_its_blocks(served):
    texts = [[3 + (i * 7 + j) % 250 for j in range(LENGTH)] for i in range(300)]
    added = asyncio.Event()
    served.engine.on_add, before = (lambda _: added.set()), served.engine.on_add
    leaving = asyncio.create_task(embed(served, texts))
    await added.wait()
    other = asyncio.create_task(embed(served, "another text"))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    served.engine.on_add = before
    assert len((await other).data) == 1
    await embed(served, "a step later")
    stats = served.engine.stats
    assert (stats.in_use_blocks, stats.running, stats.waiting) == (0, 0, 0)
    assert stats.prompt_tokens < 300 * LENGTH


async def test_an_aborted_text_ends_the_request_with_503(served):
    added, engine = asyncio.Event(), served.engine
    engine.on_add, before = (lambda _: added.set()), engine.on_add
    os.kill(engine._core.pid, signal.SIGSTOP)  # so that the text is aborted before it is computed
    try:
        headers = {"x-request-id": "halted"}
        request = asyncio.create_task(served.http.post("/v1/embeddings", json={"input": "a"}, headers=headers))
        await added.wait()
        await engine.abort("embd-halted-0")
    finally:
        engine.on_add = before
        os.kill(engine._core.pid, signal.SIGCONT)
    answer = await request
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


async def test_metrics_count_texts_as_ended(served):
    before = await served.metrics()
    await embed(served, ["a", "b"])
    after = await served.metrics()
    name = 'vllm:request_success_total{finished_reason="stop"}'
    assert after[name] - before[name] == 2
    assert after["vllm:generation_tokens_total"] == 0
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == 2


async def test_a_model_that_generates_has_no_vectors(core_server):
    with pytest.raises(NotFoundError, match="--runner pooling"):
        await embed(core_server, "a")


async def test_dimensions_need_a_matryoshka_model(tmp_path):
    folder = make_embedder("qwen3", tmp_path)
    config = EngineConfig(model=str(folder), runner="pooling", dtype="float32", num_gpu_blocks_override=50)
    async with running(config, DEFAULT_LOADER) as llm, serving(llm) as server:
        with pytest.raises(BadRequestError, match=r"dimensions=16.*64 dimensions.*is_matryoshka"):
            await embed(server, "a", dimensions=16)
        assert len((await embed(server, "a", dimensions=64)).data[0].embedding) == 64
