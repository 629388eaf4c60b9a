"""Shares of a resource: who counts as another tenant, and for how long."""

import pytest
from octavo_server.http.tenant_shares import PRESENCE_S, TenantShares
from octavo_testing.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shares(clock):
    return TenantShares(100, 0.5, clock)


def test_a_tenant_alone_has_no_limit(shares):
    shares.record_request("alice")
    shares.add("alice", 90)
    assert shares.limit("alice") is None


def test_another_tenant_counts_for_some_time_after_its_last_request(shares, clock):
    shares.record_request("bob")
    shares.record_request("alice")
    clock.now_s += PRESENCE_S
    assert (shares.limit("alice"), shares.limit("bob")) == (50, 50)
    clock.now_s += 0.1
    assert shares.limit("alice") is None


def test_another_tenant_counts_while_it_holds_something(shares, clock):
    shares.record_request("bob")
    shares.add("bob", 1)
    clock.now_s += 10 * PRESENCE_S
    shares.record_request("alice")
    assert shares.limit("alice") == 50
    shares.add("bob", -1)
    assert (shares.limit("alice"), shares.limit("bob")) == (None, 50)


def test_requests_of_many_tenants_are_remembered(shares, clock):
    for tenant in ("alice", "bob", "bob", "carol", "carol"):
        clock.now_s += PRESENCE_S / 2
        shares.record_request(tenant)
    assert shares.limit("carol") == 50, "bob was there less than a minute ago"
    clock.now_s += PRESENCE_S / 2
    shares.record_request("carol")
    assert shares.limit("carol") is None
    assert shares.limit("bob") == 50


def test_what_was_returned_leaves_no_trace(shares):
    shares.add("alice", 7)
    shares.add("alice", -7)
    assert shares.held("alice") == 0
    assert shares.limit("bob") is None
