"""Admin routes of a router, tested on the ASGI application."""

from contextlib import asynccontextmanager

import httpx
import pytest
from octavo_server.router.admin_routes import AdminContext, build_admin
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.observe.report import Reporter, Waiting
from octavo_server.router.observe.request_observer import RouterTelemetry
from octavo_server.router.observe.state_stream import StateFeed
from octavo_server.router.observe.workers import Workers
from octavo_testing.router_parts import PROMPT, decision, exact_replica
from octavo_testing.server import parse_metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Parts:
    def __init__(self):
        self.index = PrefixIndex(max_entries=1000)
        self.replicas = [exact_replica("a", self.index, epoch=2**63 + 1), exact_replica("b", self.index)]
        self.replicas[1].state = "loading"
        self.telemetry = RouterTelemetry()

    @asynccontextmanager
    async def http(self):
        reporter = Reporter(
            telemetry=self.telemetry,
            index=self.index,
            replicas=lambda: self.replicas,
            waiting=lambda: Waiting({"a": 1, "b": 2}, {"cold": 2}),
            clock=lambda: 0.0,
        )
        workers = Workers(reporter)
        context = AdminContext(workers=workers, feed=StateFeed(workers.state))
        transport = httpx.ASGITransport(build_admin(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
            yield http


async def test_decisions_list_each_candidate_and_the_cached_tokens():
    parts = Parts()
    observer = parts.telemetry.observe("r-1")
    observer.model = "tiny"
    observer.record_decision(PROMPT, decision(*parts.replicas), 0.00002)
    observer.record_first_byte(48)
    observer.record_end(200, "finished")
    async with parts.http() as http:
        (info,) = (await http.get("/debug/decisions")).json()["decisions"]
    assert (info["request_id"], info["chosen"], info["rung"], info["why"]) == ("r-1", "a", "exact", "least cost")
    assert (info["expected_tokens"], info["cached_tokens"], info["ended"]) == (64, 48, "finished")
    assert [(c["replica"], c["matched_blocks"], round(c["cost_s"], 3)) for c in info["candidates"]] == [
        ("a", 4, 0.013),
        ("b", 0, 0.023),
    ]


async def test_ended_decisions_continue_after_the_given_numbers():
    parts = Parts()
    for number in range(3):
        observer = parts.telemetry.observe(f"r-{number}")
        observer.record_decision(PROMPT, decision(*parts.replicas), 0.0)
        if number != 1:
            observer.record_end(200, "finished")
    async with parts.http() as http:
        first, last = (await http.get("/debug/decisions/ended")).json()["decisions"]
        after = {"after": [f"{first['worker']}:{first['number']}", "another:9"]}
        (later,) = (await http.get("/debug/decisions/ended", params=after)).json()["decisions"]
        refused = await http.get("/debug/decisions/ended", params={"after": "here"})
    assert (first["request_id"], last["request_id"]) == ("r-0", "r-2")
    assert later == last
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


async def test_the_index_shows_its_size_and_each_replica():
    parts = Parts()
    parts.index.store(parts.replicas[0].blocks.slot, range(10))
    async with parts.http() as http:
        shown = (await http.get("/debug/index")).json()
    assert (shown["index"]["entries"], shown["index"]["max_entries"]) == (10, 1000)
    assert [(r["name"], r["epoch"], r["admitted"]) for r in shown["replicas"]] == [
        ("a", "8000000000000001", True),
        ("b", "0000000000000001", False),
    ]


async def test_metrics_show_the_state_at_the_scrape():
    parts = Parts()
    async with parts.http() as http:
        found = parse_metrics((await http.get("/metrics")).text)
    assert found['octavo_router_endpoints{state="exact"}'] == 1
    assert found['octavo_router_endpoints{state="loading"}'] == 1
    assert found['octavo_router_held_requests{model=""}'] == 2
    assert found["octavo_router_endpoints_admitted"] == 1
    assert found["octavo_router_queue_size"] == 3
    assert found["octavo_router_index_divergence_ratio"] == 0.5


@pytest.mark.parametrize("n", ["0", "-1", "1001", "x"])
async def test_an_invalid_number_of_decisions_is_refused(n):
    async with Parts().http() as http:
        answer = await http.get("/debug/decisions", params={"n": n})
    assert answer.status_code == 400
    assert "1000" in answer.json()["error"]["message"]
