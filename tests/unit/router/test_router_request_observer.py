import pytest
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.observe.decision_log import DecisionLog
from octavo_server.router.observe.metrics.counters import MAX_VALUES, RouterMetrics
from octavo_server.router.observe.metrics.render import MetricText
from octavo_server.router.observe.request_observer import RouterTelemetry
from octavo_testing.router_parts import PROMPT, decision, exact_replica
from octavo_testing.server import parse_metrics


@pytest.fixture
def replicas():
    index = PrefixIndex(max_entries=100)
    return exact_replica("a", index), exact_replica("b", index)


def shown(*metrics, gauges=None):
    found = parse_metrics(str(MetricText([one.snapshot() for one in metrics], gauges or {})))
    return {name.removeprefix("octavo_router_"): value for name, value in found.items() if value}


def test_the_wall_time_of_a_moment_is_constant(monkeypatch):
    """Otherwise a client that polls decisions could not detect the new ones."""
    wall = iter((1000.1, 1000.2, 1000.7))
    monkeypatch.setattr("octavo_server.router.observe.request_observer.time.time", lambda: next(wall))
    telemetry = RouterTelemetry(clock=lambda: 10.0)
    assert telemetry.time_of(12.0) == telemetry.time_of(12.0) == pytest.approx(1002.1)


def test_a_retried_request_has_two_decisions_and_one_end(replicas):
    now = [10.0]
    telemetry = RouterTelemetry(clock=lambda: now[0])
    observer = telemetry.observe("r-1")
    observer.model = "tiny"
    observer.record_decision(PROMPT, decision(*replicas), 0.00002)
    observer.record_retry("connect")
    observer.record_decision(PROMPT, decision(replicas[1], expected_tokens=0), 0.00002)
    now[0] = 10.5
    observer.record_first_byte(16)
    now[0] = 12.0
    observer.record_end(200, "finished")
    second, first = telemetry.decisions.latest(10)
    assert (first.attempt, first.reason, first.code, first.cached_tokens) == (1, "connect", None, None)
    assert (second.attempt, second.reason, second.code, second.cached_tokens) == (2, "finished", 200, 16)
    assert second.ttft_s == 0.5
    found = shown(telemetry.metrics)
    assert found['requests_total{model="tiny",code="200",reason="finished"}'] == 1
    assert found['retries_total{reason="connect"}'] == 1
    assert found['decisions_total{rung="exact"}'] == 2
    assert found['overlap_tokens_total{source="exact"}'] == 64
    assert found['prediction_error_tokens_total{direction="under"}'] == 16
    assert found['request_duration_seconds_sum{model="tiny"}'] == 2.0


def test_the_log_keeps_the_latest_and_lists_the_newest_first(replicas):
    log = DecisionLog(2)
    telemetry = RouterTelemetry(decisions=log)
    for number in range(4):
        telemetry.observe(f"r-{number}").record_decision(PROMPT, decision(*replicas), 0.0)
    assert [entry.request_id for entry in log.latest(10)] == ["r-3", "r-2"]
    assert [entry.request_id for entry in log.latest(1)] == ["r-3"]


def test_ended_decisions_are_listed_in_the_order_of_their_ends(replicas):
    log = DecisionLog(2)
    telemetry = RouterTelemetry(decisions=log)
    observers = [telemetry.observe(f"r-{number}") for number in range(5)]
    for observer in observers:
        observer.record_decision(PROMPT, decision(*replicas), 0.0)
    for number in (1, 0, 4):
        observers[number].record_end(200, "finished")
    assert [(entry.request_id, entry.number) for entry in log.ended_after(0)] == [("r-0", 2), ("r-4", 3)]
    assert [entry.request_id for entry in log.ended_after(2)] == ["r-4"]
    assert [*log.ended_after(3)] == []
    assert log.worker != DecisionLog(2).worker


def test_a_failed_attempt_ends_once(replicas):
    telemetry = RouterTelemetry()
    observer = telemetry.observe("r")
    observer.record_decision(PROMPT, decision(*replicas), 0.0)
    observer.record_retry("status 503")
    assert [entry.reason for entry in telemetry.decisions.ended_after(0)] == ["status 503"]
    observer.record_end(503, "unavailable")
    assert [entry.reason for entry in telemetry.decisions.ended_after(0)] == ["unavailable"]


def test_counts_of_workers_are_summed():
    parts = [RouterMetrics(), RouterMetrics()]
    for duration_s, metrics in zip((0.02, 3.0), parts, strict=True):
        metrics.record_end(model="tiny", code=200, reason="finished", duration_s=duration_s)
        metrics.record_wait("sent", duration_s)
    found = shown(*parts)
    assert found['requests_total{model="tiny",code="200",reason="finished"}'] == 2
    assert found['request_duration_seconds_sum{model="tiny"}'] == 3.02
    assert found['request_duration_seconds_bucket{model="tiny",le="0.025"}'] == 1
    assert found['queue_seconds_count{outcome="sent"}'] == 2


def test_the_number_of_model_labels_is_bounded():
    metrics = RouterMetrics()
    for number in range(MAX_VALUES + 50):
        metrics.record_end(model=f"m{number}", code=404, reason="refused", duration_s=0.001)
    requests = [name for name in shown(metrics) if name.startswith("requests_total")]
    assert len(requests) == MAX_VALUES + 1
    assert shown(metrics)['requests_total{model="other",code="404",reason="refused"}'] == 50


def test_gauges_are_given_at_the_scrape():
    assert shown(RouterMetrics(), gauges={"endpoints": {("exact",): 3}, "queue_size": {(): 2}}) == {
        'endpoints{state="exact"}': 3,
        "queue_size": 2,
    }
