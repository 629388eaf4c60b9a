"""Headers, paths and content types, as vLLM 0.32 handles them."""

import json

import httpx
import pytest
import pytest_asyncio
from octavo_engine.wire.records import EngineStats
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/completions/render": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
}


@pytest_asyncio.fixture(loop_scope="module")
async def locked(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), api_key=("k",)) as served:
        yield served


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", None])
async def test_a_body_of_another_type_than_json_is_refused(served, path, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = await served.http.post(path, content=json.dumps(BODIES[path]), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
async def test_json_is_accepted_with_parameters(served, kind):
    headers = {"content-type": kind}
    answer = await served.http.post("/v1/completions", content=b'{"prompt": "hi"}', headers=headers)
    assert answer.status_code == 200


async def test_a_line_break_is_no_trailing_slash(served):
    assert (await served.http.get("/v1/models/%0A")).status_code == 404


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/metrics"])
async def test_probes_with_a_trailing_slash_are_redirected_without_a_key(locked, path):
    answer = await locked.http.get(f"{path}/")
    assert (answer.status_code, httpx.URL(answer.headers["location"]).path) == (307, path)


async def test_the_model_list_with_a_trailing_slash_is_redirected(locked):
    assert (await locked.http.get("/v1/models/")).status_code == 401
    answer = await locked.http.get("/v1/models/", headers={"authorization": "Bearer k"})
    assert (answer.status_code, httpx.URL(answer.headers["location"]).path) == (307, "/v1/models")


async def test_no_page_may_read_responses_unless_it_is_named(locked):
    headers = {"origin": "https://example.org", "authorization": "Bearer k"}
    answer = await locked.http.get("/v1/models", headers=headers)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2.0"),
        ("JSON", 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0}}'),
        ("json", 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0}}'),
        ("BIN", None),
        (None, None),
    ],
)
async def test_the_load_is_in_a_header_on_request(served, path, form, expected):
    served.engine.stats = EngineStats(waiting=2, in_use_blocks=64, total_blocks=256)
    headers = {} if form is None else {"endpoint-load-metrics-format": form}
    answer = await served.http.post(path, json=BODIES[path], headers=headers)
    assert answer.headers.get("endpoint-load-metrics") == expected
