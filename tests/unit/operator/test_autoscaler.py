"""The autoscaler writes its decisions by /scale: as leader only, with the version that was read, until it succeeds."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from octavo_operator.cluster import autoscaler as autoscaler_module
from octavo_operator.cluster.autoscaler import Autoscaler, Sample
from octavo_operator.cluster.client import ApiError
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.view import Key, View
from octavo_operator.scaling.service_load import ServiceLoad
from octavo_operator.service import Settings
from octavo_testing.clock import Clock
from octavo_testing.infsvc_cases import Case, stored

KEY: Key = ("default", "llm")
KEY_OF_NO_SERVICE: Key = ("default", "none")
SETTINGS = Settings(engine_image="engine:1", router_image="router:1", operator_namespace="octavo-system")
SLEEP = {"maxReplicas": 4, "scaleToZero": {"idleSeconds": 60}}


class Loads:
    def __init__(self) -> None:
        load = ServiceLoad(kv_used_replicas=0.0, waiting_requests=0, requests={"r": ("s", 1)})
        self.sample_ = Sample(total=1, serving=1, load=load)

    def sample(self, key: Key) -> Sample:
        return self.sample_


class FakeCluster:
    """Takes writes to /scale, with the version that they name; refuses as many as `faults`."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int, str]] = []
        self.faults = 0
        self.on_write: Callable[[], object] = lambda: None

    async def scale_service(self, namespace: str, name: str, replicas: int, *, version: str) -> None:
        if self.faults:
            self.faults -= 1
            raise ApiError(409, "Conflict", "the object has been modified")
        self.written.append((name, replicas, version))
        self.on_write()


class Leading:
    may_write = True


class Bench:
    def __init__(self) -> None:
        self.view, self.loads, self.cluster, self.leadership = View(), Loads(), FakeCluster(), Leading()
        self.queue, self.clock = WorkQueue[Key](), Clock()
        unchecked: dict[str, Any] = {"leadership": self.leadership, "queue": self.queue, "clock": self.clock}
        made: Any = (self.cluster, self.view, self.loads)
        self.autoscaler = Autoscaler(*made, settings=lambda: SETTINGS, **unchecked)

    def store(
        self, *, name: str = "llm", version: str = "1", generation: int = 1, uid: str = "u1", **spec: Any
    ) -> None:
        raw = stored(Case("", spec, name=name))
        raw["metadata"] |= {"resourceVersion": version, "generation": generation, "uid": uid}
        self.view.update(raw)

    async def step(self, seconds: float = 0.0) -> None:
        self.clock.now_s += seconds
        await self.autoscaler.step(KEY)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@asynccontextmanager
async def _running(bench: Bench) -> AsyncIterator[asyncio.Task[None]]:
    """Run the autoscaler during the block, which has ten seconds."""
    running = asyncio.create_task(bench.autoscaler.run())
    try:
        async with asyncio.timeout(120):
            yield running
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_decision_is_written_with_the_version_that_was_read(bench: Bench) -> None:
    bench.store(version="41", replicas=1, autoscaling=SLEEP)
    await bench.step()
    await bench.step(60)
    assert bench.cluster.written == [("llm", 0, "41")]
    assert next(iter(bench.autoscaler.rows())).desired_replicas == 0


async def test_a_wake_is_counted(bench: Bench) -> None:
    bench.store(replicas=0, autoscaling=SLEEP)
    bench.loads.sample_ = Sample(held=2)
    await bench.step()
    (row,) = bench.autoscaler.rows()
    assert (bench.cluster.written, row.num_wakes, row.max_replicas) == ([("llm", 1, "1")], 1, 4)


async def test_only_the_leader_writes_and_the_other_one_keeps_the_idle_time(bench: Bench) -> None:
    bench.leadership.may_write = False
    bench.store(replicas=1, autoscaling=SLEEP)
    await bench.step()
    await bench.step(60)
    assert bench.cluster.written == []
    bench.leadership.may_write = True
    await bench.step()
    assert bench.cluster.written == [("llm", 0, "1")]


async def test_a_refused_write_is_tried_again_and_counts_once(bench: Bench) -> None:
    bench.store(replicas=0, autoscaling=SLEEP)
    bench.loads.sample_, bench.cluster.faults = Sample(held=1), 1
    with pytest.raises(ApiError):
        await bench.step()
    await bench.step(5)
    (row,) = bench.autoscaler.rows()
    assert (bench.cluster.written, row.num_wakes) == ([("llm", 1, "1")], 1)


async def test_a_changed_decision_queues_the_service_for_its_status(bench: Bench) -> None:
    bench.store(replicas=0, autoscaling=SLEEP)
    await bench.step()
    assert await bench.queue.get() == KEY
    bench.queue.done(KEY)
    await bench.step(5)
    assert len(bench.queue) == 0
    state = bench.autoscaler.state_of(KEY)
    assert state is not None
    assert state.reason == "ScaledToZero"


async def test_the_first_status_of_a_service_has_a_decision(bench: Bench) -> None:
    bench.store(replicas=0, autoscaling=SLEEP)
    state = bench.autoscaler.state_of(KEY)
    assert state is not None
    assert state.reason == "ScaledToZero"
    await bench.step()
    assert (len(bench.queue), bench.cluster.written) == (0, [])


async def test_an_edit_keeps_the_history_and_a_new_service_of_the_name_has_none(bench: Bench) -> None:
    bench.store(replicas=1, autoscaling=SLEEP)
    await bench.step()
    bench.store(version="2", generation=2, replicas=1, autoscaling=SLEEP | {"maxReplicas": 5})
    await bench.step(60)
    assert [written[1] for written in bench.cluster.written] == [0]
    bench.store(version="3", uid="u2", replicas=1, autoscaling=SLEEP)
    await bench.step()
    assert len(bench.cluster.written) == 1


@pytest.mark.parametrize("spec", [{}, {"autoscaling": {"maxReplicas": "many"}}])
async def test_without_a_readable_autoscaling_nothing_is_written(bench: Bench, spec: dict[str, Any]) -> None:
    bench.store(replicas=1, autoscaling=SLEEP)
    await bench.step()
    bench.store(version="2", generation=2, replicas=1, **spec)
    await bench.step(60)
    assert bench.cluster.written == []
    assert bench.autoscaler.state_of(KEY) is None


async def test_a_request_that_is_held_during_a_look_is_seen_by_the_next_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscaler_module, "LOOK_EVERY_S", 1e6)
    other = ("default", "other")
    for _, name in (KEY, other):
        bench.store(name=name, replicas=0, autoscaling=SLEEP)
    async with _running(bench) as running:
        while len([*bench.autoscaler.rows()]) < 2:
            await asyncio.sleep(0)
        bench.loads.sample_ = Sample(held=1)
        following = iter([other, KEY, other])  # each write is followed by a request for the next service
        bench.cluster.on_write = lambda: bench.autoscaler.look(next(following, KEY_OF_NO_SERVICE))
        bench.autoscaler.look(KEY)
        while len(bench.cluster.written) < 4:
            assert not running.done()
            await asyncio.sleep(0)
    assert [name for name, _, _ in bench.cluster.written] == ["llm", "other", "llm", "other"]


async def test_after_a_conflict_the_write_is_repeated_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_module, "LOOK_EVERY_S", 1e6)
    monkeypatch.setattr(autoscaler_module, "CONFLICT_S", 0.0)
    bench.store(replicas=0, autoscaling=SLEEP)
    bench.loads.sample_, bench.cluster.faults = Sample(held=1), 3
    async with _running(bench) as running:
        while not bench.cluster.written:
            assert not running.done()
            await asyncio.sleep(0)
    assert bench.cluster.written == [("llm", 1, "1")]


async def test_a_held_request_is_seen_at_once_and_one_bad_service_stops_no_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    bench.store(replicas=0, autoscaling=SLEEP)
    bench.cluster.faults = 1
    async with _running(bench):
        while not [*bench.autoscaler.rows()]:
            await asyncio.sleep(0)
        bench.loads.sample_ = Sample(held=1)
        for _ in range(2):  # the first write fails
            bench.autoscaler.look(KEY)
            while bench.cluster.faults == 1:
                await asyncio.sleep(0)
        while not bench.cluster.written:
            bench.autoscaler.look(KEY)
            await asyncio.sleep(0)
    assert "the object has been modified" in caplog.text
