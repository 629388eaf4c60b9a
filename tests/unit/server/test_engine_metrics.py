"""Labels of `cache_config_info`, and the totals by tenant."""

from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.metrics import METRICS
from octavo_engine.wire.records import TenantUsage
from octavo_server.engine_metrics import cache_labels
from octavo_server.request_metrics import MAX_TENANTS, TenantTotals
from octavo_testing.scripted import ready_info
from octavo_testing.server import parse_metrics


def test_the_labels_have_the_size_in_tokens_and_in_requests():
    config = EngineConfig(num_gpu_blocks_override=100, max_model_len=600, gpu_memory_utilization=0.5)
    (names,) = (metric.labels for metric in METRICS if metric.name == "cache_config_info")
    values = cache_labels(config, ready_info(config))
    assert dict(zip(names, values, strict=True)) == {
        "block_size": "16",
        "num_gpu_blocks": "100",
        "num_cpu_blocks": "0",
        "enable_prefix_caching": "True",
        "cache_dtype": "float32",
        "gpu_memory_utilization": "0.5",
        "swap_space": "0.0",
        "kv_cache_size_tokens": "1600",
        "kv_cache_max_concurrency": "2.63",
    }


def test_tenants_beyond_the_first_thousand_are_counted_together():
    totals = TenantTotals({"model_name": "m", "engine": "0"})
    for number in range(MAX_TENANTS + 5):
        totals.add_usage({f"t{number}": TenantUsage(prompt_tokens=3, cached_tokens=1, generation_tokens=2)})
        totals.add_request(f"t{number}", "stop")
    totals.add_usage({"t7": TenantUsage(generation_tokens=1)})
    totals.add_request("t7", "cut")
    found = parse_metrics(totals.text())
    assert len(found) == (3 + 1) * (MAX_TENANTS + 1) + 1
    assert found['octavo:tenant_tokens_total{tenant="t7",kind="generated"}'] == 3
    assert found['octavo:tenant_tokens_total{tenant="(others)",kind="prompt"}'] == 5 * 3
    assert found['octavo:tenant_requests_total{tenant="(others)",reason="stop"}'] == 5
    assert found['octavo:tenant_requests_total{tenant="t7",reason="cut"}'] == 1


def test_a_tenant_with_requests_alone_is_one_of_the_thousand():
    totals = TenantTotals({})
    for number in range(MAX_TENANTS):
        totals.add_request(f"t{number}", "error")
    totals.add_usage(
        {"late": TenantUsage(generation_tokens=1), "idle": TenantUsage(running=1), "t1": TenantUsage(prompt_tokens=1)}
    )
    found = parse_metrics(totals.text())
    assert found['octavo:tenant_tokens_total{tenant="(others)",kind="generated"}'] == 1
    assert found['octavo:tenant_tokens_total{tenant="t1",kind="prompt"}'] == 1
    assert 'octavo:tenant_tokens_total{tenant="idle",kind="prompt"}' not in found
