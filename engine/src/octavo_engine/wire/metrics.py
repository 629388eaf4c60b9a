"""The metrics of a replica as data: names, types, labels and buckets. The server turns them into Prometheus metrics.

Names and buckets are vLLM's, so that dashboards, routers and autoscalers made for vLLM work unchanged; metrics that
only Octavo has begin with the prefix `octavo:`. As in vLLM, some counters of features that a replica lacks are exposed
as zero (dashboards add them up), and a metric is left out if its `feature` is off.

`prometheus_client` appends `_total` to a counter's name; `iteration_tokens_total` is a histogram despite its name.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]
Feature = Literal["", "lora", "spec_decode", "kv_cache_metrics", "nan_check"]

DEFAULT_PREFIX = "vllm:"
OWN_PREFIX = "octavo:"
COMMON_LABELS = ("model_name", "engine")

TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
BLOCK_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800),
)
STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. `labels`: labels after `COMMON_LABELS`. `old_names`: deprecated names that are exposed beside `name`.

    A histogram without `buckets` counts tokens; its buckets are 1, 2, 5, 10, 20, ... up to the model's length.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    old_names: tuple[str, ...] = ()
    feature: Feature = ""
    own: bool = False

    def full_name(self, prefix: str = DEFAULT_PREFIX) -> str:
        return (OWN_PREFIX if self.own else prefix) + self.name

    def exposed_names(self, prefix: str = DEFAULT_PREFIX) -> tuple[str, ...]:
        return self.full_name(prefix), *(prefix + old for old in self.old_names)

    def bounds(self, max_model_len: int) -> tuple[float, ...]:
        return self.buckets or steps_1_2_5(max_model_len)


def steps_1_2_5(limit: int) -> tuple[float, ...]:
    """Return the numbers 1, 2, 5, 10, 20, ... that are at most `limit`."""
    steps = (m * 10**e for e in range(len(str(limit))) for m in (1, 2, 5))
    return tuple(float(s) for s in steps if s <= limit)


def _gauge(name: str, help: str, *labels: str, old: tuple[str, ...] = (), feature: Feature = "") -> Metric:
    return Metric(name=name, kind="gauge", help=help, labels=labels, old_names=old, feature=feature)


def _counter(name: str, help: str, *labels: str, old: tuple[str, ...] = (), feature: Feature = "") -> Metric:
    return Metric(name=name, kind="counter", help=help, labels=labels, old_names=old, feature=feature)


def _histogram(
    name: str, help: str, buckets: tuple[float, ...] = (), old: tuple[str, ...] = (), feature: Feature = ""
) -> Metric:
    return Metric(name=name, kind="histogram", help=help, buckets=buckets, old_names=old, feature=feature)


def _own(name: str, kind: Kind, help: str, *labels: str, buckets: tuple[float, ...] = ()) -> Metric:
    return Metric(name=name, kind=kind, help=help, labels=labels, buckets=buckets, own=True)


VLLM_METRICS: tuple[Metric, ...] = (
    _gauge("num_requests_running", "Requests in the running batch."),
    _gauge("num_requests_waiting", "Requests waiting to be scheduled."),
    _gauge(
        "num_requests_waiting_by_reason",
        "Requests waiting, by reason: capacity, or deferred (the grammar, images or adapter are not prepared).",
        "reason",
    ),
    _gauge(
        "kv_cache_usage_perc",
        "Share of KV blocks referenced by a request, 0 to 1; blocks that are only cached don't count.",
        old=("gpu_cache_usage_perc",),
    ),
    _gauge("engine_sleep_state", "1 for the sleep state that the engine is in, 0 for the other states.", "sleep_state"),
    _gauge(
        "cache_config_info",
        "Configuration of the KV cache, as labels; always 1.",
        *("block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching"),
        *("cache_dtype", "gpu_memory_utilization", "swap_space"),
        *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
    ),
    _gauge(
        "lora_requests_info",
        "Adapters of running and of waiting requests, as labels; the value is the Unix time of the latest change.",
        *("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        feature="lora",
    ),
    _counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", old=("gpu_prefix_cache_queries",)),
    _counter("prefix_cache_hits", "Tokens found in the prefix cache.", old=("gpu_prefix_cache_hits",)),
    _counter("external_prefix_cache_queries", "Tokens looked up in an external KV store."),
    _counter("external_prefix_cache_hits", "Tokens found in an external KV store."),
    _counter("mm_cache_queries", "Images looked up in the cache of processed images."),
    _counter("mm_cache_hits", "Images found in the cache of processed images."),
    _counter("num_preemptions", "Requests removed from the running batch because KV blocks ran out."),
    _counter("prompt_tokens", "Prompt tokens processed."),
    _counter("prompt_tokens_by_source", "Prompt tokens, by the source of their KV.", "source"),
    _counter("prompt_tokens_cached", "Prompt tokens whose KV was cached."),
    _counter("prompt_tokens_recomputed", "Prompt tokens computed again after a preemption."),
    _counter("generation_tokens", "Tokens generated."),
    _counter("request_success", "Requests that ended, by finish reason.", "finished_reason"),
    _counter("corrupted_requests", "Requests whose logits held a NaN.", feature="nan_check"),
    _counter("admission_rejections", "Requests refused because the queue was full."),
    _histogram("request_prompt_tokens", "Prompt tokens per request."),
    _histogram("request_generation_tokens", "Generated tokens per request."),
    _histogram("request_max_num_generation_tokens", "Tokens of the longest sequence generated per request."),
    _histogram("request_params_max_tokens", "Value of the parameter max_tokens per request."),
    _histogram("request_prefill_kv_computed_tokens", "Prompt tokens computed per request, without cached tokens."),
    _histogram("request_params_n", "Value of the parameter n per request.", SEQUENCES),
    _histogram("request_num_preemptions", "Preemptions per request.", PREEMPTIONS),
    _histogram("iteration_tokens_total", "Tokens per engine step.", STEP_TOKENS),
    _histogram("time_to_first_token_seconds", "Time from a request's arrival to its first token.", TTFT_S),
    _histogram(
        "inter_token_latency_seconds",
        "Time between two consecutive tokens of a request.",
        TOKEN_S,
        ("time_per_output_token_seconds",),
    ),
    _histogram("request_time_per_output_token_seconds", "Mean time per token of a request after the first.", TOKEN_S),
    _histogram("e2e_request_latency_seconds", "Time from a request's arrival to its end.", REQUEST_S),
    _histogram("request_queue_time_seconds", "Time from a request's queueing to its first scheduling.", REQUEST_S),
    _histogram("request_inference_time_seconds", "Time from first scheduling to last token of a request.", REQUEST_S),
    _histogram("request_prefill_time_seconds", "Time from first scheduling to first token of a request.", REQUEST_S),
    _histogram("request_decode_time_seconds", "Time from first to last token of a request.", REQUEST_S),
    _histogram(
        "kv_block_lifetime_seconds",
        "Time from a KV block's allocation to its eviction (sampled).",
        BLOCK_S,
        feature="kv_cache_metrics",
    ),
    _histogram(
        "kv_block_idle_before_evict_seconds",
        "Idle time of a KV block before its eviction (sampled).",
        BLOCK_S,
        feature="kv_cache_metrics",
    ),
    _histogram(
        "kv_block_reuse_gap_seconds",
        "Time between two uses of a KV block (sampled).",
        BLOCK_S,
        feature="kv_cache_metrics",
    ),
    _counter("spec_decode_num_drafts", "Drafts proposed.", feature="spec_decode"),
    _counter("spec_decode_num_draft_tokens", "Draft tokens proposed.", feature="spec_decode"),
    _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", feature="spec_decode"),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft.",
        "position",
        feature="spec_decode",
    ),
)

OWN_METRICS: tuple[Metric, ...] = (
    _own("startup_seconds", "gauge", "Seconds of the engine's start by phase: import, compile, weights.", "phase"),
    _own("memory_bytes", "gauge", "Bytes of weights and kv_cache in memory; 0 while sleep has given them back.", "tag"),
    _own("kv_blocks", "gauge", "KV blocks by state: free, cached, in_use.", "state"),
    _own("kv_used_slots", "gauge", "Token slots of KV blocks that hold the KV of running requests."),
    _own("host_kv_blocks", "gauge", "KV blocks in CPU memory by state: used, total.", "state"),
    _own("preemptions_by_mode", "counter", "Preemptions by mode: swap or recompute.", "mode"),
    _own(
        "swapped_blocks",
        "counter",
        "KV blocks moved between device and host memory, by direction: out (to the host) or in.",
        "direction",
    ),
    _own(
        "stage_bytes",
        "counter",
        "Bytes that rank 0 exchanged with other pipeline stages, by direction: forward (to the second stage) or back "
        "(from the last one).",
        "direction",
    ),
    _own("dropped_blocks", "counter", "KV blocks evicted from host memory or, without swap space, from the device."),
    _own("recomputed_tokens", "counter", "Tokens computed again after a preemption, because their KV was dropped."),
    _own("cow_copies", "counter", "KV blocks copied before a write because they were shared."),
    _own("encoded_images", "counter", "Images that the model has encoded to rows of embeddings."),
    _own("image_encoding_seconds", "counter", "Seconds of encoding images."),
    _own("encoder_cache_usage_perc", "gauge", "Share of the cache of encoded images that is in use, 0 to 1."),
    _own(
        "tenant_tokens",
        "counter",
        "Tokens by tenant and kind: prompt, cached (prompt tokens found in the cache), generated.",
        *("tenant", "kind"),
    ),
    _own(
        "tenant_requests",
        "counter",
        "Requests that ended, by tenant and reason: stop, length, abort, error, cut (the client left).",
        *("tenant", "reason"),
    ),
    _own("step_seconds", "histogram", "Duration of an engine step.", buckets=STEP_S),
)

METRICS: tuple[Metric, ...] = VLLM_METRICS + OWN_METRICS


def active_metrics(features: frozenset[Feature] = frozenset()) -> tuple[Metric, ...]:
    """Return the metrics of a replica with these optional features."""
    return tuple(m for m in METRICS if not m.feature or m.feature in features)
