"""The text of `/metrics`, which keeps the families that have not changed, equals what the client library renders."""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from octavo_engine.frontend.adapter_names import NamedAdapter
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.metrics import COMMON_LABELS, METRICS
from octavo_engine.wire.records import EngineStats, TenantUsage
from octavo_server import telemetry
from octavo_server.router.observe.metrics.catalogue import BY_NAME
from octavo_server.router.observe.metrics.counters import RouterMetrics
from octavo_server.router.observe.report import Report, exposition
from octavo_server.telemetry import Telemetry
from octavo_testing.scripted import ready_info
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.parser import text_string_to_metric_families

CHANGES, MODEL = 1000, 'a"b\\c'
TENANTS = ["", "alice", 'b"\\\n} 1\nfake{tenant="', "\u20ac"]
#: Families of the process, which differ between any two readings.
OF_PROCESS = ("process_", "python_gc_")
HISTOGRAMS = [metric.name for metric in METRICS if metric.kind == "histogram" and metric.feature != "nan_check"]


class Replica:
    """The metrics of a replica, with all features, and its random changes."""

    def __init__(self, seed: int = 0) -> None:
        self.draws = random.Random(seed)
        self.stats, self.sleeping, self.adapters = EngineStats(), frozenset(), {}
        config = EngineConfig(enable_lora=True, kv_cache_metrics=True)
        self.telemetry = Telemetry(
            model_name=MODEL,
            config=config,
            ready=ready_info(config),
            stats=lambda: self.stats,
            sleeping=lambda: self.sleeping,
            adapters=lambda: self.adapters,
            prefix="vllm:",
        )
        self.tenants = CollectorRegistry()
        self.tenant_tokens = CounterMetric(
            "octavo:tenant_tokens", "", (*COMMON_LABELS, "tenant", "kind"), registry=self.tenants
        )
        self.tenant_requests = CounterMetric(
            "octavo:tenant_requests", "", (*COMMON_LABELS, "tenant", "reason"), registry=self.tenants
        )
        self.histograms, self._reference = CollectorRegistry(), defaultdict(list)
        for metric in METRICS:
            for name in metric.exposed_names() if metric.name in HISTOGRAMS else ():
                bounds = metric.bounds(ready_info(config).max_model_len)
                histogram = Histogram(name, metric.help, COMMON_LABELS, buckets=bounds, registry=self.histograms)
                self._reference[metric.name].append(histogram.labels(MODEL, "0"))

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.telemetry.observe(name, value, times)
        for histogram in self._reference[name] * times:
            histogram.observe(value)

    def change(self) -> None:
        draws, metrics = self.draws, self.telemetry
        match draws.randrange(10):
            case 0:
                value = draws.choice([0, 1, 64, 1e7, draws.randrange(2**20) / 1024])  # sums without rounding
                self.observe(draws.choice(HISTOGRAMS), value, draws.choice([0, 1, 64]))
            case 1:
                field = draws.choice(["running", "waiting", "generation_tokens", "in_use_blocks", "drafts"])
                self.stats = replace(self.stats, **{field: draws.choice([0, 1, 10**6, 10**21])})
            case 2:
                metrics.record_step(replace(self.stats, running_adapters=[draws.choice("ab")]))
            case 3:
                self.sleeping = draws.choice([frozenset(), frozenset({"weights"}), frozenset({"weights", "kv_cache"})])
            case 4:
                metrics.count_end(draws.choice(["stop", "length", "abort", "error"]))
            case 5:
                metrics.count_rejection()
            case 6:
                self.adapters = {name: NamedAdapter(name, f"/{name}", None) for name in draws.sample("abc", 2)}
            case 7:
                path = draws.choice(["/v1/completions", "none"])
                metrics.http.observe(
                    handler=path, method="POST", status=200, duration_s=0.2, request_bytes=9, response_bytes=99
                )

            case 8:
                usage = TenantUsage(prompt_tokens=draws.randrange(9), cached_tokens=2, generation_tokens=10**9)
                tenant = draws.choice(TENANTS)
                metrics.record_step(replace(self.stats, tenants={tenant: usage}))
                for kind, count in ("prompt", usage.prompt_tokens), ("cached", 2), ("generated", 10**9):
                    self.tenant_tokens.labels(MODEL, "0", tenant or "(keyless)", kind).inc(count)
            case 9:
                tenant, reason = draws.choice(TENANTS), draws.choice(["stop", "cut"])
                metrics.tenants.add_request(tenant, reason)
                self.tenant_requests.labels(MODEL, "0", tenant or "(keyless)", reason).inc()


def own_families(text: bytes) -> list[bytes]:
    """Return the text of each family, without those of the process."""
    families = text.split(b"# HELP ")[1:]
    return [family for family in families if not family.decode().startswith(OF_PROCESS)]


@pytest.mark.parametrize("scrapes_every", [1, 7, 100])
def test_after_random_changes_the_text_equals_that_of_the_client_library(scrapes_every):
    replica = Replica(seed=scrapes_every)
    for i in range(CHANGES):
        replica.change()
        if i % scrapes_every == 0:
            replica.telemetry.exposition()
    text, reference = replica.telemetry.exposition(), generate_latest(replica.telemetry._registry)
    before_tenants = text[: text.index(b"# HELP octavo:tenant_tokens_total")]
    assert samples(text.removeprefix(before_tenants).decode()) == samples(generate_latest(replica.tenants).decode())
    text = before_tenants
    assert own_families(text) == own_families(reference)
    assert len(own_families(text)) > len(METRICS) - 2
    assert set(own_families(generate_latest(replica.histograms))) <= set(own_families(text))


def test_after_random_changes_the_text_of_a_router_equals_that_of_the_client_library():
    draws, metrics, registry = random.Random(0), RouterMetrics(), CollectorRegistry()
    ended = CounterMetric("octavo_router_requests", "", ["model", "code", "reason"], registry=registry)
    bounds = BY_NAME["request_duration_seconds"].bounds
    duration = Histogram("octavo_router_request_duration_seconds", "", ["model"], buckets=bounds, registry=registry)
    for i in range(CHANGES):
        model, code, seconds = draws.choice(["a", MODEL, "c\n"]), draws.choice([200, 499]), draws.randrange(2**14) / 64
        metrics.record_end(model=model, code=code, reason="finished", duration_s=seconds)
        ended.labels(model, code, "finished").inc()
        duration.labels(model).observe(seconds)
        if i % 7 == 0:
            exposition([Report(observed=metrics.snapshot())])
    text = exposition([Report(observed=metrics.snapshot())])
    assert samples(generate_latest(registry).decode()) <= samples(text)


def samples(text: str) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    families = text_string_to_metric_families(text)
    return {(name, frozenset(labels.items()), value) for f in families for name, labels, value, *_ in f.samples}


def test_a_scrape_renders_only_the_families_that_have_changed(monkeypatch):
    replica, rendered = Replica(), Counter()

    def counted(registry):
        families = [*registry.collect()]
        rendered.update(family.name for family in families if not family.name.startswith(OF_PROCESS))
        return generate_latest(registry)

    monkeypatch.setattr(telemetry, "generate_latest", counted)
    replica.telemetry.exposition()
    assert rendered.total() > len(METRICS)
    rendered.clear()
    replica.telemetry.exposition()
    assert rendered == Counter()
    replica.telemetry.observe("inter_token_latency_seconds", 0.02, 64)
    replica.telemetry.count_rejection()
    replica.telemetry.exposition()
    names = ("inter_token_latency_seconds", "time_per_output_token_seconds", "admission_rejections")
    assert rendered == Counter(f"vllm:{name}" for name in names)
