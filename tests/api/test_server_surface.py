"""Routes besides generation: models, tokens, keys, metrics, documentation."""

import json
from importlib.metadata import Distribution

import pytest
import pytest_asyncio
from octavo_engine.wire.metrics import active_metrics
from octavo_engine.wire.records import EngineStats
from octavo_server.http.cors import CorsPolicy
from octavo_server.router import admin_routes
from octavo_testing.routing import routing
from octavo_testing.scripted import text_ids, write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))
    async with serving(engine, served_model_names=(MODEL, "alias/name")) as started:
        yield started


async def test_models_are_listed_with_their_length(served):
    listed = await served.openai.models.list()
    assert [card.id for card in listed.data] == [MODEL, "alias/name"]
    card = listed.data[0]
    assert (card.object, card.max_model_len, card.root, card.parent) == ("model", 512, served.engine.config.model, None)
    assert card.permission[0]["allow_sampling"] is True


async def test_model_is_found_by_its_name(served):
    assert (await served.openai.models.retrieve("alias/name")).id == "alias/name"
    answer = await served.http.get("/v1/models/gpt-x")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize("asked", [None, "alias/name"])
async def test_response_has_the_first_served_name(served, asked):
    body = {"prompt": "a", **({"model": asked} if asked else {})}
    assert (await served.http.post("/v1/completions", json=body)).json()["model"] == MODEL


async def test_prompt_survives_tokenize_and_detokenize(served):
    answer = (await served.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (text_ids("hé"), 3, 512)
    assert answer["token_strs"] == ["h", "Ã", "©"]
    back = await served.http.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "hé"}


async def test_tokenize_accepts_a_conversation(served):
    answer = (await served.http.post("/tokenize", json={"messages": HELLO})).json()
    assert served.engine.frontend.tokenizer.decode(answer["tokens"], skip_special_tokens=False) == RENDERED
    assert answer["token_strs"] is None
    await served.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert served.engine.requests[0].prompt_token_ids == answer["tokens"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HELLO}], ids=["neither", "both"])
async def test_tokenize_requires_exactly_one_input_form(served, body):
    assert (await served.http.post("/tokenize", json=body)).status_code == 400


async def test_detokenize_rejects_unknown_token_ids(served):
    answer = await served.http.post("/detokenize", json={"tokens": [2**40]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


async def test_the_version_is_read_from_the_package_once(served, routed, monkeypatch):
    monkeypatch.setattr(Distribution, "from_name", lambda _: pytest.fail("a request reads the package's metadata"))
    for server, path in ((served, "/version"), (routed, "/version"), (served, "/server_info")):
        assert (await server.http.get(path)).json()["version"] == "0.1.0"


async def test_a_router_shows_the_version_of_its_package(monkeypatch):
    monkeypatch.setattr(admin_routes, "version", lambda package: f"9 of {package}")
    async with routing("http://127.0.0.1:1") as router:
        assert (await router.http.get("/version")).json() == {"version": "9 of octavo-server"}


PAGE = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, None),
        ({"api_key": ("k",)}, None),
        ({"api_key": ("k",), "cors": CorsPolicy(allowed_origins=("*",))}, "*"),
        ({"cors": CorsPolicy(allowed_origins=("*",))}, "*"),
        ({"cors": CorsPolicy(allowed_origins=("https://example.org",))}, "https://example.org"),
        ({"cors": CorsPolicy(allowed_origins=("https://other.org",))}, None),
    ],
)
async def test_pages_of_allowed_origins_may_read_responses(tmp_path, settings, allowed):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), **settings) as served:
        preflight = await served.http.options("/v1/chat/completions", headers=PAGE)
        assert preflight.headers.get("access-control-allow-origin") == allowed
        answer = await served.http.get("/version", headers=PAGE)
        assert answer.headers.get("access-control-allow-origin") == allowed
        if allowed is not None:
            assert {"retry-after", "x-ratelimit-reset-tokens"} <= {
                *answer.headers["access-control-expose-headers"].split(", ")
            }


async def test_openapi_document_declares_errors_and_bodies(served):
    document = (await served.http.get("/openapi.json")).json()
    assert "422" not in json.dumps(document)
    schemas = document["components"]["schemas"]
    for path, body in (("/v1/chat/completions", "ChatCompletionRequest"), ("/v1/completions", "CompletionRequest")):
        operation = document["paths"][path]["post"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference == f"#/components/schemas/{body}"
        assert operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorResponse")
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "ChatChoice" in schemas
    missing = {ref.rsplit("/", 1)[1] for ref in _references(document)} - schemas.keys()
    assert not missing


def _references(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


async def test_every_metric_is_exposed_under_old_and_new_names(served):
    text = (await served.http.get("/metrics")).text
    exposed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    for metric in active_metrics():
        suffix = "_total" if metric.kind == "counter" else ""
        for name in (metric.full_name(), *("vllm:" + old for old in metric.old_names)):
            assert name + suffix in exposed


async def test_gauges_and_counters_show_the_totals_of_the_engine(served):
    served.engine.stats = EngineStats(
        running=3, waiting=2, free_blocks=10, cached_blocks=20, in_use_blocks=10, total_blocks=40,
        prefix_cache_queries=100, prefix_cache_hits=60, preemptions=5, prompt_tokens=100, generation_tokens=70,
    )  # fmt: skip
    metrics = await served.metrics()
    expected = {
        "vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25, "vllm:prefix_cache_queries_total": 100, "vllm:prefix_cache_hits_total": 60,
        "vllm:gpu_prefix_cache_hits_total": 60, "vllm:num_preemptions_total": 5, "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 70, 'octavo:kv_blocks{state="cached"}': 20,
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"}': 60,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected


async def test_request_is_measured(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        served.engine.num_cached_tokens = 1
        assert (await served.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})).status_code == 200
        metrics = await served.metrics()
    counts = {
        "time_to_first_token_seconds": 1, "inter_token_latency_seconds": 4, "time_per_output_token_seconds": 4,
        "request_time_per_output_token_seconds": 1, "e2e_request_latency_seconds": 1, "request_params_n": 1,
    }  # fmt: skip
    assert {name: metrics[f"vllm:{name}_count"] for name in counts} == counts
    sums = {
        "request_prompt_tokens": 3, "request_generation_tokens": 5, "request_max_num_generation_tokens": 5,
        "request_params_max_tokens": 5, "request_prefill_kv_computed_tokens": 2, "request_queue_time_seconds": 0.1,
        "request_prefill_time_seconds": 0.2, "request_decode_time_seconds": 0.3, "request_inference_time_seconds": 0.5,
    }  # fmt: skip
    assert {name: metrics[f"vllm:{name}_sum"] for name in sums} == sums
    assert metrics['vllm:request_success_total{finished_reason="length"}'] == 1


async def test_steps_are_measured(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        served.engine.on_stats(EngineStats(steps=1, batched_tokens=70, step_s=0.02))
        served.engine.on_stats(EngineStats(steps=1, batched_tokens=70, step_s=0.001))
        metrics = await served.metrics()
    assert [metrics[f"vllm:iteration_tokens_total_{part}"] for part in ("count", "sum")] == [1, 70]
    assert [metrics[f"octavo:step_seconds_{part}"] for part in ("count", "sum")] == [1, 0.02]


async def test_documentation_routes_can_be_turned_off(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), disable_fastapi_docs=True) as served:
        assert [(await served.http.get(path)).status_code for path in ("/docs", "/openapi.json")] == [404, 404]
