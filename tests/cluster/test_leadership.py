"""Leader election with a real API server: one operator leads, and stops writing before another one can lead."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest
from kubernetes import client
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from octavo_operator.cluster.client import Cluster
from octavo_operator.cluster.lease import DEADLINE_S, DURATION_S, Leadership
from octavo_testing.clock import Clock
from octavo_testing.cluster import kubeconfig


@pytest.fixture
async def cluster(api: client.ApiClient) -> AsyncIterator[Cluster]:
    """`api` skips the test without a cluster."""
    found = Configuration()
    await config.load_kube_config(config_file=str(kubeconfig()), client_configuration=found)
    async with ApiClient(found) as connected:
        yield Cluster(connected)


def _candidate(cluster: Cluster, namespace: str, lease: str, identity: str, clock: Clock) -> Leadership:
    return Leadership(cluster, namespace=namespace, name=lease, identity=identity, clock=clock)


async def test_a_second_operator_leads_only_after_the_lease_expired(cluster: Cluster, namespace: str) -> None:
    lease, clock = f"lease-{secrets.token_hex(4)}", Clock()
    first, second = (_candidate(cluster, namespace, lease, name, clock) for name in ("first", "second"))
    await first.try_once()
    await second.try_once()
    assert (first.may_write, second.may_write) == (True, False)
    clock.now_s += DURATION_S
    await second.try_once()
    assert not second.may_write
    clock.now_s += 1
    await second.try_once()
    assert (first.may_write, second.may_write) == (False, True)
    await first.try_once()
    assert not first.may_write


async def test_a_holder_that_cannot_renew_stops_before_the_lease_expires(cluster: Cluster, namespace: str) -> None:
    clock = Clock()
    holder = _candidate(cluster, namespace, f"lease-{secrets.token_hex(4)}", "holder", clock)
    await holder.try_once()
    clock.now_s += DEADLINE_S
    assert not holder.may_write
    assert DEADLINE_S < DURATION_S


async def test_a_holder_that_paused_too_long_reports_a_gap(cluster: Cluster, namespace: str) -> None:
    clock, gaps = Clock(), []
    holder = Leadership(
        cluster,
        namespace=namespace,
        name=f"lease-{secrets.token_hex(4)}",
        identity="holder",
        clock=clock,
        on_gap=lambda: gaps.append(clock.now_s),
    )
    await holder.try_once()
    lost = asyncio.create_task(holder.lost.wait())
    await asyncio.sleep(0)
    assert not gaps
    clock.now_s += DEADLINE_S
    await holder.try_once()
    assert holder.may_write
    assert await asyncio.wait_for(lost, 5)
    assert gaps == [DEADLINE_S]


async def test_a_retired_holder_stops_writing_but_keeps_the_lease(cluster: Cluster, namespace: str) -> None:
    lease, clock = f"lease-{secrets.token_hex(4)}", Clock()
    first, second = (_candidate(cluster, namespace, lease, name, clock) for name in ("first", "second"))
    await first.try_once()
    first.retire()
    await first.try_once()
    await second.try_once()
    assert not first.may_write
    assert not second.may_write


async def test_a_stopped_holder_releases_the_lease(cluster: Cluster, namespace: str) -> None:
    lease, clock = f"lease-{secrets.token_hex(4)}", Clock()
    first, second = (_candidate(cluster, namespace, lease, name, clock) for name in ("first", "second"))
    running = asyncio.create_task(first.run())
    async with asyncio.timeout(30):
        await first.gained.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await second.try_once()
    assert (first.may_write, second.may_write) == (False, True)
