"""One service that goes wrong stops no other, whatever it is; and whoever kills a worker, kills it."""

import asyncio
from typing import Any

import pytest
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reconciler import Reconciler
from octavo_operator.cluster.view import Key, View
from octavo_operator.metrics import Telemetry
from octavo_operator.service import Settings


class Troubled(Reconciler):
    def __init__(self, queue: WorkQueue[Key]) -> None:
        nobody: Any = Nobody()
        super().__init__(
            nobody,
            View(),
            settings=Settings(engine_image="e", router_image="r", operator_namespace="o"),
            leadership=nobody,
            reports=nobody,
            queue=queue,
            secret_of=str,
            telemetry=Telemetry(),
        )
        self.looked: asyncio.Queue[str] = asyncio.Queue()

    async def reconcile(self, key: Key) -> None:
        self.looked.put_nowait(key[1])
        if key[1] == "bad":
            raise KeyError("a field that nobody thought of")


class Nobody:
    identity = "nobody"


async def test_a_service_that_makes_us_stumble_is_told_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    queue = WorkQueue[Key]()
    reconciler = Troubled(queue)
    for name in ("bad", "good"):
        queue.add(("default", name))
    working = asyncio.create_task(reconciler.work())
    async with asyncio.timeout(10):
        assert [await reconciler.looked.get() for _ in range(3)] == ["bad", "good", "bad"]
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert "default/bad: a mistake of ours" in caplog.text
    assert "a field that nobody thought of" in caplog.text
