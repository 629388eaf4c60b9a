"""`/score` and `/rerank` on a tiny embedding model: equal to numpy's cosines of the vectors of `/v1/embeddings`."""

import asyncio
import os
import signal

import numpy as np
import pytest
import pytest_asyncio
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig
from octavo_testing.core_process import running
from octavo_testing.embedders import make_embedder
from octavo_testing.routing import routing
from octavo_testing.server import MODEL, held_in_threads, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "which text is near"
DOCUMENTS = [f"document {i * 7919 % 101} of them" for i in range(100)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    folder = make_embedder("qwen3", tmp_path_factory.mktemp("model"))
    config = EngineConfig(
        model=str(folder), runner="pooling", dtype="float32", max_model_len=128, num_gpu_blocks_override=200
    )
    async with running(config, DEFAULT_LOADER) as llm, serving(llm) as server:
        yield server


async def post(served, path, **body):
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def vectors(served, texts):
    answer = await served.openai.embeddings.create(model=MODEL, input=texts)
    found = np.array([entry.embedding for entry in answer.data])
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cosines(served):
    query, *documents = await vectors(served, [QUERY, *DOCUMENTS])
    return np.array(documents) @ query


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_order_and_scores_are_those_of_the_vectors(served, cosines, path):
    answer = await post(served, path, model=MODEL, query=QUERY, documents=DOCUMENTS)
    results = answer["results"]
    assert [entry["index"] for entry in results] == np.argsort(-cosines, kind="stable").tolist()
    assert np.allclose([entry["relevance_score"] for entry in results], np.sort(cosines)[::-1], atol=1e-5)
    texts = [entry["document"]["text"] for entry in results if "document" in entry]
    assert texts == ([] if path == "/v2/rerank" else [DOCUMENTS[entry["index"]] for entry in results])


async def test_the_query_is_computed_once(served):
    before = served.engine.stats.prompt_tokens
    answer = await post(served, "/rerank", query=QUERY, documents=DOCUMENTS)
    num_tokens = sum(map(len, [QUERY, *DOCUMENTS]))
    assert answer["usage"]["prompt_tokens"] == num_tokens
    assert served.engine.stats.prompt_tokens - before == num_tokens


async def test_best_documents_as_objects(served, cosines):
    documents = [{"text": text} for text in DOCUMENTS]
    body = {"query": QUERY, "documents": documents, "top_n": 3, "return_documents": False}
    assert [set(entry) for entry in (await post(served, "/rerank", **body))["results"]] == [
        {"index", "relevance_score"}
    ] * 3
    assert len((await post(served, "/rerank", **body | {"top_n": 0}))["results"]) == 100


@pytest.mark.parametrize("documents", [DOCUMENTS[0], {"text": DOCUMENTS[0]}], ids=["text", "object"])
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_one_document_needs_no_list(served, cosines, path, documents):
    (entry,) = (await post(served, path, query=QUERY, documents=documents, return_documents=True))["results"]
    assert (entry["index"], entry["document"]["text"]) == (0, DOCUMENTS[0])
    assert np.isclose(entry["relevance_score"], cosines[0], atol=1e-5)


@pytest.mark.parametrize("value", [True, False, None])
async def test_a_cosine_is_the_same_with_and_without_activation(served, cosines, value):
    ranks = await post(served, "/rerank", query=QUERY, documents=DOCUMENTS[:1], use_activation=value)
    scores = await post(served, "/score", text_1=QUERY, text_2=DOCUMENTS[0], use_activation=value)
    found = [ranks["results"][0]["relevance_score"], scores["data"][0]["score"]]
    assert np.allclose(found, cosines[0], atol=1e-5)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_of_one_text_and_of_pairs(served, cosines, path):
    one = await post(served, path, text_1=QUERY, text_2=DOCUMENTS)
    assert (one["object"], [entry["index"] for entry in one["data"]]) == ("list", list(range(100)))
    assert np.allclose([entry["score"] for entry in one["data"]], cosines, atol=1e-5)
    pairs = await post(served, path, queries=DOCUMENTS[:3], documents=[*DOCUMENTS[:2], QUERY])
    assert np.allclose([entry["score"] for entry in pairs["data"]], [1, 1, cosines[2]], atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a", {"title": "b"}]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a", "b" * 129]}, "documents[1]"),
        ("/rerank", {"query": "b" * 129, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ""}, "documents"),
        ("/rerank", {"query": "a", "documents": {"title": "b"}}, "documents"),
        ("/rerank", {"query": "a", "documents": "a", "use_activation": 3}, "use_activation"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": 3}, "use_activation"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"] * 1025}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "stream": True}, "stream"),
        ("/v2/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/score", {"text_1": "a", "text_2": "b", "n": 2}, "n"),
    ],
)
async def test_bad_input_names_the_field(served, path, body, param):
    before = served.engine.stats.received
    answer = await served.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert served.engine.stats.received == before


async def test_a_model_that_generates_has_no_scores(core_server):
    for path in ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"):
        answer = await core_server.http.post(path, json={})
        assert (answer.status_code, "--runner pooling" in answer.text) == (404, True)


async def test_a_replica_dies_behind_a_router(served, cosines):
    """Each of 50 requests is answered, and computes its query once."""
    async with (
        running(served.engine.config, DEFAULT_LOADER) as second,
        serving(second) as other,
        routing(served.url, other.url) as router,
    ):
        await router.routable(MODEL, 2)
        body = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS[:5]}
        num_tokens = sum(map(len, [QUERY, *DOCUMENTS[:5]]))
        pending = [asyncio.create_task(router.http.post("/v1/rerank", json=body)) for _ in range(50)]
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        os.kill(second._core.pid, signal.SIGKILL)
        answers = await asyncio.gather(*pending)
        assert [answer.status_code for answer in answers] == [200] * 50
        assert {answer.json()["usage"]["prompt_tokens"] for answer in answers} == {num_tokens}
        order = np.argsort(-cosines[:5], kind="stable").tolist()
        assert all([entry["index"] for entry in answer.json()["results"]] == order for answer in answers)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
    ids=["embeddings", "score", "rerank"],
)
async def test_a_body_holds_its_memory_until_its_texts_are_tokenised(served, monkeypatch, path, body):
    held = held_in_threads(served, monkeypatch)
    await post(served, path, **body, padding="x" * 200)
    assert held
    assert min(held) > 200
