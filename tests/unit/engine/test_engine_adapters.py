"""Adapters of an engine core: loading beside steps, requests of an adapter that leaves, and sleep."""

from concurrent.futures import Future

import pytest
from octavo_engine.config import SchedulerConfig
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.engine import EngineCore
from octavo_engine.wire.errors import InvalidRequest, OctavoError, StartupError, Unavailable
from octavo_engine.wire.records import EngineRequest
from octavo_testing.scripted import ScriptedExecutor, scripted, scripted_hash

A, B = scripted_hash("a"), scripted_hash("b")


class Rig:
    def __init__(self) -> None:
        self.executor = ScriptedExecutor()
        self.executor.adapters = [A]
        scheduler = Scheduler(SchedulerConfig(max_model_len=64, num_blocks=64, block_size=4, debug_invariants=True))
        self.core = EngineCore(scheduler, self.executor, adapters=[A])
        self.replies: list[str | OctavoError] = []

    def add(self, request_id: str, adapter: str) -> None:
        params = scripted("abcdef", max_tokens=4, ignore_eos=True)
        self.core.add(EngineRequest(request_id=request_id, prompt_token_ids=[1, 2], params=params, adapter=adapter))

    def run(self) -> dict[str, str]:
        """Run all requests; return their finish reasons."""
        reasons = {}
        while self.core.has_work():
            for out in self.core.step().outputs:
                if out.finish_reason is not None:
                    reasons[out.request_id] = str(out.finish_reason)
        return reasons

    def start(self, location: str) -> None:
        self.core.start_loading_adapter(location, self.replies.append)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_an_adapter_that_is_being_read_delays_no_step(rig: Rig) -> None:
    reading = rig.executor.preparing["b"] = Future()
    wakes: list[bool] = []
    rig.core.on_more_work(lambda: wakes.append(True))
    rig.start("b")
    rig.add("1", "")
    rig.add("2", B)
    assert rig.run() == {"1": "length", "2": "error"}
    assert (rig.replies, wakes) == ([], [])
    reading.set_result(B)
    assert wakes == [True]
    assert rig.core.has_work()
    rig.core.step()
    assert (rig.replies, rig.executor.adapters) == ([B], [A, B])
    rig.add("3", B)
    assert rig.run() == {"3": "length"}


def test_an_adapter_leaves_after_its_last_request(rig: Rig) -> None:
    rig.add("1", A)
    rig.core.step()
    rig.core.unload_adapter(A)
    rig.add("2", A)
    rig.core.step()
    assert rig.executor.adapters == [A]
    assert rig.run() == {"1": "length"}
    assert rig.executor.adapters == []
    rig.core.unload_adapter(A)
    rig.core.step()


def test_stats_have_the_adapters_of_running_and_waiting_requests(rig: Rig) -> None:
    rig.add("1", A)
    rig.add("2", "")
    waiting = rig.core.stats()
    assert (waiting.running_adapters, waiting.waiting_adapters) == ([], [A])
    rig.core.step()
    running = rig.core.stats()
    assert (running.running_adapters, running.waiting_adapters) == ([A], [])
    rig.run()
    assert rig.core.stats().running_adapters == []


def test_an_adapter_that_leaves_can_be_loaded_again(rig: Rig) -> None:
    rig.add("1", A)
    rig.core.step()
    rig.core.unload_adapter(A)
    rig.start("a")
    rig.add("2", A)
    rig.core.step()
    rig.add("3", A)
    assert rig.run() == {"1": "length", "3": "length"}
    assert A in rig.executor.adapters


@pytest.mark.parametrize(
    ("failure", "kind"), [(StartupError("rank 64"), InvalidRequest), (MemoryError("full"), Unavailable)]
)
def test_a_failure_is_reported_and_changes_nothing(rig: Rig, failure: Exception, kind: type[OctavoError]) -> None:
    failed = rig.executor.preparing["b"] = Future()
    failed.set_exception(failure)
    rig.start("b")
    rig.core.step()
    (reply,) = rig.replies
    assert isinstance(reply, kind)
    assert str(failure) in str(reply)
    assert rig.executor.adapters == [A]


def test_an_adapter_that_was_read_while_the_engine_fell_asleep_is_not_added(rig: Rig) -> None:
    reading = rig.executor.preparing["b"] = Future()
    rig.start("b")
    rig.core.call("sleep", ["kv_cache"])
    reading.set_result(B)
    rig.core.step()
    assert [type(reply) for reply in rig.replies] == [Unavailable]
    assert rig.executor.adapters == [A]


def test_an_executor_without_adapters_refuses(rig: Rig) -> None:
    def refuse(location: str) -> Future[object]:
        raise StartupError(f"adapter {location}: adapters need --enable-lora: add it.")

    rig.executor.prepare_adapter = refuse  # type: ignore[method-assign]
    rig.start("b")
    rig.core.step()
    assert [type(reply) for reply in rig.replies] == [InvalidRequest]
