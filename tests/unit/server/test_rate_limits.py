"""Limits of tenants in one process: what counts and for how long, and what a response says. In virtual time."""

import pytest
from octavo_server.http.rate_limits import BUSY_RETRY_S, REPORT_S, SILENCE_S, WINDOW_S, RateLimits, TenantUse
from octavo_server.http.tenants_file import NO_LIMITS
from octavo_server.kv.frames import TenantLoad
from octavo_server.kv.publisher import TenantWindow
from octavo_server.openai.errors import RateLimited
from octavo_testing.clock import Clock


def limits_of(**fields):
    return NO_LIMITS.model_copy(update=fields)


@pytest.mark.parametrize("reported", [0, 1, 2, 3, 5])
def test_a_report_includes_the_oldest_requests(reported):
    clock = Clock()
    limits, loads = RateLimits(clock), {}
    limits.record_report("a", 1, loads)
    for _ in range(3):
        limits.admit("alice", limits_of(requests_per_minute=9), 10).record_sent("a")
    loads["alice"] = TenantLoad(reported, reported, reported, 10 * reported, reported)
    own, others = max(3 - reported, 0), max(reported - 3, 0)
    used = TenantUse(requests=max(reported, 3), tokens=10 * max(reported, 3), own=3, others=others, unreported=own)
    assert limits.usage("alice") == limits.usage("alice") == used
    clock.now_s = REPORT_S  # a report that arrives so late includes all
    limits.record_report("a", 1, loads)
    assert limits.usage("alice") == used._replace(requests=reported, tokens=10 * reported, unreported=0)


@pytest.mark.parametrize("per_s", [1, 10])
def test_requests_count_once_while_as_many_leave_the_window(per_s):
    clock = Clock()
    limits, window = RateLimits(clock), TenantWindow(clock)
    for number in range(90 * per_s):
        clock.now_s = number / per_s
        window.expire()
        limits.record_report("a", 1, window.loads)
        with limits.admit("alice", limits_of(requests_per_minute=1000), 10) as request:
            request.record_sent("a")
            window.add_request("alice", 10)
        window.end_request("alice")
    used, load = limits.usage("alice"), window.loads["alice"]
    assert (used.requests, used.tokens, used.unreported) == (load.requests, load.tokens, 0)


def test_requests_in_progress_at_a_replica_that_left_count_no_longer():
    clock = Clock()
    limits = RateLimits(clock)
    limits.record_report("a", 1, {"alice": TenantLoad(unfinished=3, requests=3, tokens=9)})
    assert limits.usage("alice") == TenantUse(requests=3, tokens=9, own=0, others=3, unreported=0)
    clock.now_s = SILENCE_S
    assert limits.usage("alice").others == 0
    limits.record_report("a", 2, {})
    clock.now_s = WINDOW_S - 0.1
    assert limits.usage("alice").requests == 3
    clock.now_s = WINDOW_S + 1
    assert limits.usage("alice").requests == 0
    clock.now_s = SILENCE_S + WINDOW_S + 1
    assert limits.usage("alice") == TenantUse(0, 0, 0, 0, 0)
    assert (limits._reports, limits._departed) == ({}, [])


def test_refused_and_failed_requests_count_for_nothing():
    limits = RateLimits(Clock())
    alice = limits_of(requests_per_minute=2, tokens_per_minute=100, concurrent_requests=2)
    with limits.admit("alice", alice, 10) as first:
        assert limits.usage("alice") == TenantUse(1, 10, 1, 0, 1)
        first.record_sent("a")
        first.forget()  # it failed there
        assert limits.usage("alice") == TenantUse(0, 0, 1, 0, 0)
        first.record_sent("b")
        with limits.admit("alice", alice, 10):  # it never leaves the queue
            assert limits.usage("alice") == TenantUse(2, 20, 2, 0, 2)
            with pytest.raises(RateLimited):
                limits.admit("alice", alice, 10)
        assert limits.usage("alice") == TenantUse(1, 10, 1, 0, 1)
    assert limits.usage("alice") == TenantUse(1, 10, 0, 0, 1)


def test_requests_that_a_replica_refuses_hide_none_of_other_processes():
    limits, alice = RateLimits(Clock()), limits_of(concurrent_requests=4)
    limits.record_report("a", 1, {"alice": TenantLoad(unfinished=3, requests=3, tokens=9)})
    for retried in (False, True) * 5:
        with limits.admit("alice", alice, 10) as request:
            request.record_sent("a")
            request.forget()
            if retried:
                request.record_sent("b")
        assert limits.usage("alice").others == 3


def test_headers_and_messages_name_each_limit():
    clock = Clock()
    limits = RateLimits(clock)
    alice = limits_of(requests_per_minute=2, tokens_per_minute=100)

    def send(tokens):
        with limits.admit("alice", alice, tokens) as request:
            request.record_sent("a")
            return [
                request.headers[f"x-ratelimit-{name}-{what}"]
                for what in ("requests", "tokens")
                for name in ("limit", "remaining", "reset")
            ]

    assert send(30) == ["2", "1", "60s", "100", "70", "60s"]
    clock.now_s = 20.5
    assert send(90) == ["2", "0", "42s", "100", "0", "42s"]
    with pytest.raises(RateLimited, match=r"'alice' used 2 requests .*limit is 2 \(requestsPerMinute\)") as refused:
        send(1)
    assert refused.value.retry_after_s == 42
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
    clock.now_s += 42
    assert send(1) == ["2", "0", "20s", "100", "9", "20s"]
    busy = limits_of(concurrent_requests=1)
    with limits.admit("bob", busy, 1), pytest.raises(RateLimited, match=r"'bob' has 1 requests in progress") as refused:
        limits.admit("bob", busy, 1)
    assert (refused.value.retry_after_s, refused.value.headers) == (BUSY_RETRY_S, {})


def test_tenants_without_limits_and_replicas_without_requests_take_no_memory():
    clock = Clock()
    limits = RateLimits(clock)
    with limits.admit("alice", limits_of(weight=2.0, max_tokens=3), 10) as request:
        request.record_sent("a")
        request.forget()
    assert request.headers == {}
    assert (limits._places, limits._sent, limits._lately) == ({}, {}, {})
    for i in range(1000):
        clock.now_s += 1
        with limits.admit("bob", limits_of(concurrent_requests=1), 10) as request:
            request.record_sent(f"pod-{i}")
    assert len(limits._places["bob"]) <= WINDOW_S + 2
    assert len(limits._sent["bob"]) <= WINDOW_S + 2


def test_replicas_that_left_take_no_memory_where_no_tenant_has_limits():
    clock = Clock()
    limits = RateLimits(clock)
    for number in range(1000):
        clock.now_s += 1
        for name in (f"pod-{number}", "restarting"):
            limits.record_report(name, number, {})
    assert max(len(limits._reports), len(limits._departed)) <= WINDOW_S + 2


def test_idle_tenants_take_no_memory():
    """A gateway may name any number of tenants."""
    clock = Clock()
    limits = RateLimits(clock)
    with limits.admit("busy", limits_of(concurrent_requests=1), 10) as busy:
        busy.record_sent("a")
        for i in range(1000):
            clock.now_s += 1
            with limits.admit(f"user-{i}", limits_of(concurrent_requests=1), 10) as request:
                request.record_sent("a")
            limits.record_report("b", 1, {f"guest-{i}": TenantLoad(unfinished=1, requests=1, tokens=1)})
            with pytest.raises(RateLimited):
                limits.admit(f"guest-{i}", limits_of(concurrent_requests=1), 10)
        assert limits.usage("busy").own == 1
    sizes = [len(limits._places), len(limits._sent), len(limits._lately)]
    assert max(sizes) <= 3 * WINDOW_S, sizes


@pytest.mark.parametrize("field", ["requests_per_minute", "concurrent_requests"])
def test_the_message_to_callers_without_a_key_names_none(field):
    limits, one = RateLimits(Clock()), limits_of(**{field: 1})
    with (
        limits.admit("", one, 10),
        pytest.raises(RateLimited, match=r"^Callers without an API key .*; the limit is 1 "),
    ):
        limits.admit("", one, 10)
