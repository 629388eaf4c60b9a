"""The metric list is an interface: names, kinds, labels and buckets that dashboards and autoscalers rely on."""

import pytest
from octavo_engine.wire.metrics import METRICS, OWN_METRICS, VLLM_METRICS, Metric, active_metrics, steps_1_2_5
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BY_NAME = {metric.name: metric for metric in METRICS}


def test_names_are_unique_including_old_names() -> None:
    names = [n for m in METRICS for n in (m.full_name(), *m.old_names)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "kind", "old"),
    [
        ("num_requests_running", "gauge", ()),
        ("num_requests_waiting", "gauge", ()),
        ("kv_cache_usage_perc", "gauge", ("gpu_cache_usage_perc",)),
        ("cache_config_info", "gauge", ()),
        ("prefix_cache_queries", "counter", ("gpu_prefix_cache_queries",)),
        ("prefix_cache_hits", "counter", ("gpu_prefix_cache_hits",)),
        ("num_preemptions", "counter", ()),
        ("prompt_tokens", "counter", ()),
        ("generation_tokens", "counter", ()),
        ("request_success", "counter", ()),
        ("iteration_tokens_total", "histogram", ()),
        ("time_to_first_token_seconds", "histogram", ()),
        ("inter_token_latency_seconds", "histogram", ("time_per_output_token_seconds",)),
        ("e2e_request_latency_seconds", "histogram", ()),
    ],
)
def test_metrics_that_other_tools_read_exist(name: str, kind: str, old: tuple[str, ...]) -> None:
    metric = BY_NAME[name]
    assert (metric.kind, metric.old_names, metric.full_name()) == (kind, old, f"vllm:{name}")


#: The metrics on vLLM's own page (docs: generated/metrics/general), without those that only some replicas have.
VLLM_COUNTERS = """external_prefix_cache_hits external_prefix_cache_queries generation_tokens mm_cache_hits
    mm_cache_queries num_preemptions prefix_cache_hits prefix_cache_queries prompt_tokens request_success"""
VLLM_GAUGES = "engine_sleep_state kv_cache_usage_perc num_requests_running num_requests_waiting cache_config_info"
VLLM_HISTOGRAMS = """e2e_request_latency_seconds inter_token_latency_seconds iteration_tokens_total
    request_decode_time_seconds request_generation_tokens request_inference_time_seconds
    request_max_num_generation_tokens request_params_max_tokens request_params_n request_prefill_kv_computed_tokens
    request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds
    request_time_per_output_token_seconds time_per_output_token_seconds time_to_first_token_seconds"""
KV_CACHE_METRICS = "kv_block_idle_before_evict_seconds kv_block_lifetime_seconds kv_block_reuse_gap_seconds"
BY_FEATURE = """lora_requests_info corrupted_requests spec_decode_num_drafts spec_decode_num_draft_tokens
    spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos"""


def test_every_documented_vllm_metric_is_exposed() -> None:
    shown = {name: m.kind for m in active_metrics() for name in m.exposed_names("")}
    for kind, names in (("counter", VLLM_COUNTERS), ("gauge", VLLM_GAUGES), ("histogram", VLLM_HISTOGRAMS)):
        assert {name: shown.get(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def test_metrics_of_a_feature_are_exposed_only_with_the_feature() -> None:
    shown = {m.name for m in active_metrics()}
    assert not shown & {*KV_CACHE_METRICS.split(), *BY_FEATURE.split()}
    assert {*KV_CACHE_METRICS.split(), *BY_FEATURE.split()} == {m.name for m in METRICS} - shown


def test_gateways_find_block_size_and_count() -> None:
    assert {"block_size", "num_gpu_blocks"} <= set(BY_NAME["cache_config_info"].labels)


def test_buckets_rise() -> None:
    for metric in METRICS:
        bounds = metric.bounds(8192) if metric.kind == "histogram" else ()
        assert list(bounds) == sorted(set(bounds)), metric.name


@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        (1, (1,)),
        (4, (1, 2)),
        (5, (1, 2, 5)),
        (100, (1, 2, 5, 10, 20, 50, 100)),
        (8192, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)),
    ],
)
def test_token_buckets_end_with_the_model_length(limit: int, steps: tuple[float, ...]) -> None:
    assert steps_1_2_5(limit) == steps
    assert BY_NAME["request_prompt_tokens"].bounds(limit) == steps


def test_features_add_metrics() -> None:
    plain = active_metrics()
    assert all(not m.feature for m in plain)
    assert {m.name for m in active_metrics(frozenset({"lora"}))} - {m.name for m in plain} == {"lora_requests_info"}


def test_own_metrics_have_their_own_prefix() -> None:
    assert {m.full_name("any:").split(":")[0] for m in OWN_METRICS} == {"octavo"}
    assert {m.full_name("any:").split(":")[0] for m in VLLM_METRICS} == {"any"}


def _build(metric: Metric, name: str, registry: CollectorRegistry) -> None:
    labels = ("model_name", "engine", *metric.labels)
    if metric.kind == "histogram":
        Histogram(name, metric.help, labels, buckets=metric.bounds(2048), registry=registry)
    else:
        {"gauge": Gauge, "counter": Counter}[metric.kind](name, metric.help, labels, registry=registry)


def test_prometheus_accepts_the_whole_list() -> None:
    registry = CollectorRegistry()
    for metric in METRICS:
        for name in (metric.full_name(), *(f"vllm:{old}" for old in metric.old_names)):
            _build(metric, name, registry)
    assert b"vllm:iteration_tokens_total" in generate_latest(registry)
