"""A worker survives any error of one service and keeps reconciling the others."""

import asyncio
from typing import Any

import pytest
from octavo_operator.cluster.queue import WorkQueue
from octavo_operator.cluster.reconciler import Reconciler
from octavo_operator.cluster.view import Key, View
from octavo_operator.metrics import Telemetry
from octavo_operator.service import Settings
from octavo_testing.plan_cluster import SECRETS


class FailingReconciler(Reconciler):
    def __init__(self, queue: WorkQueue[Key]) -> None:
        unused: Any = UnusedPart()
        super().__init__(
            unused,
            View(),
            settings=lambda: Settings(engine_image="e", router_image="r", operator_namespace="o"),
            leadership=unused,
            reports=unused,
            queue=queue,
            secrets_of=lambda _: SECRETS,
            scaling=lambda key: None,
            telemetry=Telemetry(),
        )
        self.reconciled: asyncio.Queue[str] = asyncio.Queue()

    async def reconcile(self, key: Key) -> None:
        self.reconciled.put_nowait(key[1])
        if key[1] == "bad":
            raise KeyError("an unexpected field")


class UnusedPart:
    identity = "operator-0"


async def test_a_bug_with_one_service_is_logged_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    queue = WorkQueue[Key]()
    reconciler = FailingReconciler(queue)
    for name in ("bad", "good"):
        queue.add(("default", name))
    working = asyncio.create_task(reconciler.work())
    async with asyncio.timeout(120):
        assert [await reconciler.reconciled.get() for _ in range(3)] == ["bad", "good", "bad"]
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    (logged,) = {record.message.partition(":")[0] for record in caplog.records}
    assert logged == "default/bad"
    assert "an unexpected field" in caplog.text
