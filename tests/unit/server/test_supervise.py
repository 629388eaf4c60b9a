import asyncio
import logging

import pytest
from octavo_server.backoff import Backoff
from octavo_server.supervise import cancel_tasks, supervised


def no_wait() -> Backoff:
    return Backoff(least_s=0.0, most_s=0.0)


async def test_a_failed_task_is_restarted_and_each_failure_logged(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []

    async def work() -> None:
        runs.append(len(runs))
        if len(runs) < 3:
            raise ValueError(f"run {len(runs)}")

    with caplog.at_level(logging.CRITICAL):
        await supervised("counting", work, no_wait())
    assert runs == [0, 1, 2]
    assert [record.args[0] for record in caplog.records if record.args] == ["counting", "counting"]
    assert all(record.exc_info for record in caplog.records)


async def test_each_failure_is_reported_to_the_backoff() -> None:
    lasted: list[float] = []

    class Recorded(Backoff):
        def next_wait_s(self, *, lasted_s: float) -> float:
            lasted.append(lasted_s)
            return 0.0

    async def work() -> None:
        if len(lasted) < 2:
            raise OSError

    await supervised("failing", work, Recorded(least_s=1.0, most_s=1.0))
    assert len(lasted) == 2


async def test_cancelling_ends_the_supervision() -> None:
    started, runs = asyncio.Event(), 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        started.set()
        await asyncio.Event().wait()

    task = supervised("waiting", work, no_wait())
    await started.wait()
    await cancel_tasks([task])
    assert task.cancelled()
    assert runs == 1
