import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.observe import workers as workers_module
from octavo_server.router.observe.report import (
    Reporter,
    ReportQuery,
    Waiting,
    exposition,
    latest_decisions,
    merged_index,
    merged_state,
)
from octavo_server.router.observe.request_observer import RouterTelemetry
from octavo_server.router.observe.workers import Workers
from octavo_testing.router_parts import PROMPT, decision, exact_replica
from octavo_testing.server import parse_metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Worker:
    def __init__(self, folder, number):
        self.index = PrefixIndex(max_entries=100)
        self.replicas = [exact_replica(name, self.index) for name in "ab"]
        self.telemetry = RouterTelemetry()
        self.reporter = Reporter(
            telemetry=self.telemetry,
            index=self.index,
            replicas=lambda: self.replicas,
            waiting=lambda: Waiting({"m": 1}),
            clock=lambda: 0.0,
        )
        self.workers = Workers(self.reporter, folder, number)

    def take_request(self, request_id):
        observer = self.telemetry.observe(request_id)
        observer.model = "tiny"
        observer.record_decision(PROMPT, decision(*self.replicas), 0.00001)
        observer.record_end(200, "finished")


@pytest_asyncio.fixture(loop_scope="module")
async def three(tmp_path):
    async with AsyncExitStack() as stack:
        started = [Worker(tmp_path, number) for number in range(3)]
        for worker in started:
            await worker.workers.start()
            stack.push_async_callback(worker.workers.stop)
        yield started


async def test_any_worker_reports_for_all(three):
    for number, worker in enumerate(three):
        worker.take_request(f"r-{number}")
        worker.index.store(worker.replicas[0].blocks.slot, range(number + 1))
    for worker in three:
        found = parse_metrics(exposition(await worker.workers.collect_reports(ReportQuery("metrics"))))
        assert found['octavo_router_requests_total{model="tiny",code="200",reason="finished"}'] == 3
        assert found["octavo_router_queue_size"] == 3
        assert found["octavo_router_index_blocks"] == 6
        assert found['octavo_router_endpoints{state="exact"}'] == 2
        assert found["process_resident_memory_bytes"] > 0
        decisions = latest_decisions(await worker.workers.collect_reports(ReportQuery("decisions", 2)), 2)
        assert [info.request_id for info in decisions] == ["r-2", "r-1"]
        ended = [report.decisions for report in await worker.workers.collect_reports(ReportQuery("ended"))]
        assert sorted(info.request_id for part in ended for info in part) == ["r-0", "r-1", "r-2"]
        numbers = {part[0].worker: part[0].number for part in ended}
        assert len(numbers) == 3
        assert not any(
            report.decisions for report in await worker.workers.collect_reports(ReportQuery("ended", after=numbers))
        )
        assert merged_index(await worker.workers.collect_reports(ReportQuery("index"))).entries == 6


async def test_a_worker_that_ended_is_no_longer_counted(three):
    await three[2].workers.stop()
    await three[2].workers.start()
    assert merged_state(await three[0].workers.collect_reports(ReportQuery("state"))).workers == 3
    await three[2].workers.stop()
    assert merged_state(await three[0].workers.collect_reports(ReportQuery("state"))).workers == 2
    three[2].workers._server = None


async def test_a_hanging_worker_counts_with_its_latest_report(three, monkeypatch, caplog):
    monkeypatch.setattr(workers_module, "ANSWER_S", 0.05)
    three[1].replicas[0].local_load.num_in_flight = 7
    assert merged_state(await three[0].workers.collect_reports(ReportQuery("state"))).replicas[0].in_flight == 7
    monkeypatch.setattr(workers_module, "_read", _never)
    with caplog.at_level(logging.WARNING):
        state = merged_state(await three[0].workers.collect_reports(ReportQuery("state")))
    assert (state.workers, state.replicas[0].in_flight) == (3, 7)
    assert "worker-1 didn't answer" in caplog.text


async def test_a_notice_reaches_each_other_worker(three):
    noticed = asyncio.Queue()
    for number, worker in enumerate(three):
        worker.workers.on_notify = lambda number=number: noticed.put_nowait(number)
    three[1].workers.notify_others()
    assert {await noticed.get(), await noticed.get()} == {0, 2}
    assert noticed.empty()
    three[1].workers.notify_others()
    three[1].workers.notify_others()
    assert {await noticed.get(), await noticed.get()} == {0, 2}


async def test_a_router_of_one_worker_sends_no_notice():
    worker = Worker(None, 0)
    worker.workers.notify_others()
    await worker.workers.stop()


async def test_the_socket_of_a_killed_worker_is_replaced(tmp_path):
    killed, other = Worker(tmp_path, 0), Worker(tmp_path, 1)
    (tmp_path / "worker-0.sock").touch()
    await other.workers.start()
    assert len(await other.workers.collect_reports(ReportQuery("state"))) == 1
    await killed.workers.start()
    assert len(await other.workers.collect_reports(ReportQuery("state"))) == 2
    await killed.workers.stop()
    await other.workers.stop()


async def test_a_fault_counts_once_and_outlives_its_replica(tmp_path):
    worker = Worker(tmp_path, 0)
    replica = worker.replicas[0]
    for state, num_faults in (("blind", 1), ("exact", 1), ("blind", 3), ("gone", 3)):
        replica.state, replica.num_faults = state, num_faults
        worker.reporter.count_faults(replica)
    worker.replicas.clear()
    found = parse_metrics(exposition(await worker.workers.collect_reports(ReportQuery("metrics"))))
    assert found["octavo_router_stream_faults_total"] == 3
    assert worker.reporter._faults == {}


async def _never(*_):
    await asyncio.Event().wait()
