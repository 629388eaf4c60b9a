"""`/metrics` of a serving engine compared with `metrics.txt`, as every change affects dashboards."""

import asyncio
import re
from collections import defaultdict

import pytest
from octavo_engine.wire.records import BlockLife, EngineStats, TenantUsage
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, parse_metrics, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Labels of every sample; the list names only further labels.
COMMON = {"model_name", "engine", "le"}


def families(text: str) -> list[str]:
    """`name type label,label bound bound ...` for each metric family, in the order of the exposition."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, set[str]] = defaultdict(set)
    bounds: dict[str, dict[str, None]] = defaultdict(dict)
    for name, inside in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        family = next(f for f in (name, re.sub("_(bucket|count|sum)$", "", name)) if f in kinds)
        found = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', inside))
        labels[family] |= found.keys() - COMMON
        assert name.startswith(("http_", "python_", "process_")) or {"model_name", "engine"} <= found.keys()
        if "le" in found:
            bounds[family][found["le"]] = None
    lines = ([name, kind, ",".join(sorted(labels[name])), *bounds[name]] for name, kind in kinds.items())
    return [" ".join(part for part in line if part) for line in lines]


async def test_names_types_labels_and_buckets_equal_the_list(served, golden):
    await served.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2})
    served.engine.on_stats(EngineStats(tenants={"alice": TenantUsage(generation_tokens=1)}))
    text = (await served.http.get("/metrics")).text
    golden("metrics.txt", "\n".join(families(text)) + "\n")


async def test_every_line_is_valid_prometheus_text(served):
    text = (await served.http.get("/metrics")).text
    line = re.compile(r'# (HELP|TYPE) \S+ .+|[a-zA-Z_:][\w:]*(\{(\w+="([^"\\\n]|\\.)*",?)*\})? [-+.\de]+(inf|nan)?')
    assert [found for found in text.splitlines() if not line.fullmatch(found)] == []
    kinds = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(kinds) == len(set(kinds))


async def test_requests_are_counted_by_route_method_and_class_of_status(served):
    before = await served.metrics()
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    sent = await served.http.post("/v1/completions", json=body)
    await served.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    await served.http.post("/v1/completions", json={**body, "stream": True})
    for path in ("/nowhere", "/elsewhere", "/health", "/metrics", "/version"):
        await served.http.get(path)
    after = await served.metrics()
    grown = {name: value - before.get(name, 0) for name, value in after.items() if name.startswith("http_")}
    assert {name: by for name, by in grown.items() if by and name.startswith("http_requests_total")} == {
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}': 2,
        'http_requests_total{handler="/v1/completions",method="POST",status="4xx"}': 1,
        'http_requests_total{handler="none",method="GET",status="4xx"}': 2,
    }
    assert grown["http_request_duration_highr_seconds_count"] == 5
    assert grown['http_request_duration_seconds_count{handler="/v1/completions",method="POST"}'] == 3
    assert grown['http_request_duration_seconds_bucket{handler="none",le="+Inf",method="GET"}'] == 2
    assert grown['http_request_size_bytes_sum{handler="/v1/completions"}'] > len(sent.request.content)
    assert grown['http_response_size_bytes_sum{handler="/v1/completions"}'] > len(sent.content)


async def test_label_with_quotes_is_escaped(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), served_model_names=('a"b\\c',)) as other:
        text = (await other.http.get("/metrics")).text
    assert 'vllm:num_requests_running{engine="0",model_name="a\\"b\\\\c"} 0' in text
    assert parse_metrics(text)


async def test_request_answered_by_middleware_counts_for_its_route(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), api_key=("key",)) as other:
        await other.http.post("/v1/completions", json={})
        await other.http.get("/v1/completions")
        metrics = await other.metrics()
    assert metrics['http_requests_total{handler="/v1/completions",method="POST",status="4xx"}'] == 1
    assert metrics['http_requests_total{handler="/v1/completions",method="GET",status="4xx"}'] == 1


async def test_block_lifetimes_are_exposed_only_with_kv_cache_metrics(served, tmp_path):
    assert not any("kv_block_lifetime" in name for name in await served.metrics())
    engine = ScriptedClient(write_byte_model(tmp_path), kv_cache_metrics=True)
    async with serving(engine) as other:
        engine.on_block_lives([BlockLife(lifetime_s=3.0, idle_s=1.5, reuse_gaps_s=[0.5, 0.25])])
        metrics = await other.metrics()
    counts = {
        "vllm:kv_block_lifetime_seconds_sum": 3.0,
        "vllm:kv_block_idle_before_evict_seconds_sum": 1.5,
        "vllm:kv_block_reuse_gap_seconds_count": 2,
        "vllm:kv_block_reuse_gap_seconds_sum": 0.75,
    }
    assert {name: metrics[name] for name in counts} == counts


async def test_a_disconnect_before_the_response_is_no_server_error(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine) as other:
        engine.hold_at = 1
        asking = asyncio.create_task(other.http.post("/v1/completions", json={"prompt": "x"}))
        await engine.held.wait()
        asking.cancel()
        await engine.aborted.get()
        while not (name := [n for n in await other.metrics() if n.startswith("http_requests_total")]):
            await asyncio.sleep(0.01)
    assert name == ['http_requests_total{handler="/v1/completions",method="POST",status="4xx"}']


async def test_a_refused_request_does_not_count_as_failed(served):
    before = await served.metrics()
    answer = await served.http.post("/v1/completions", json={"prompt": "x" * 600})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_tokens")
    after = await served.metrics()
    changed = {name for name, value in after.items() if name.startswith("vllm:") and value != before[name]}
    assert changed == set()
