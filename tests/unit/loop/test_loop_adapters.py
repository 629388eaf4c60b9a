"""Adapters of an engine core: loading beside steps, requests of an adapter that leaves, and sleep."""

from concurrent.futures import Future
from typing import Any

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.loop.loaded_adapters import MAX_LOADS, MAX_STUCK, AdapterSource
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.sources import progress
from octavo_engine.sources.progress import STALL_S, LoadEnded
from octavo_engine.wire.errors import InvalidRequest, OctavoError, StartupError, Unavailable
from octavo_engine.wire.records import EngineRequest
from octavo_testing.clock import Clock
from octavo_testing.scripted import ScriptedExecutor, scripted, scripted_adapter, scripted_hash

A, B = scripted_hash("a"), scripted_hash("b")


class Rig:
    def __init__(self, max_cpu_loras: int = 8) -> None:
        self.executor = ScriptedExecutor()
        self.executor.adapters = [A]
        scheduler = Scheduler(SchedulerConfig(max_model_len=64, num_blocks=64, block_size=4, debug_invariants=True))
        self.clock = Clock()
        start = [(A, AdapterSource("a", "a"))]
        self.core = EngineCore(scheduler, self.executor, adapters=start, max_cpu_loras=max_cpu_loras, clock=self.clock)
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
        self.core.start_loading_adapter(location, location, self.replies.append)

    def start_hanging(self, location: str) -> "Future[object]":
        reading = self.executor.preparing[location] = Future()
        self.start(location)
        return reading

    def step_after(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.core.step()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_an_adapter_that_is_being_read_delays_no_step(rig: Rig) -> None:
    wakes: list[bool] = []
    rig.core.on_more_work(lambda: wakes.append(True))
    reading = rig.start_hanging("b")
    rig.add("1", "")
    rig.add("2", B)
    assert rig.run() == {"1": "length", "2": "error"}
    assert (rig.replies, wakes) == ([], [])
    reading.set_result(scripted_adapter("b"))
    assert wakes == [True]
    assert rig.core.has_work()
    rig.core.step()
    assert (rig.replies, rig.executor.adapters) == ([B], [A, B])
    rig.add("3", B)
    assert rig.run() == {"3": "length"}


def test_an_adapter_leaves_after_its_last_request(rig: Rig) -> None:
    rig.add("1", A)
    rig.core.step()
    rig.core.unload_adapter(A, "a")
    rig.add("2", A)
    rig.core.step()
    assert rig.executor.adapters == [A]
    assert rig.run() == {"1": "length"}
    assert rig.executor.adapters == []
    rig.core.unload_adapter(A, "a")
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
    rig.core.unload_adapter(A, "a")
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
    reading = rig.start_hanging("b")
    rig.core.call("sleep", ["kv_cache"])
    reading.set_result(scripted_adapter("b"))
    rig.core.step()
    assert [type(reply) for reply in rig.replies] == [Unavailable]
    assert rig.executor.adapters == [A]


def test_an_executor_without_adapters_refuses(rig: Rig) -> None:
    def refuse(location: str, advance: object) -> Future[object]:
        raise StartupError(f"adapter {location}: adapters need --enable-lora: add it.")

    rig.executor.prepare_adapter = refuse  # type: ignore[method-assign]
    rig.start("b")
    rig.core.step()
    assert [type(reply) for reply in rig.replies] == [InvalidRequest]


def test_a_source_that_gives_no_byte_ends_its_load_and_delays_no_other(rig: Rig) -> None:
    reading = rig.start_hanging("stalled")
    rig.start("b")
    rig.core.step()
    assert rig.replies == [B]
    assert rig.core.sleep_s() == STALL_S
    rig.step_after(STALL_S - 1)
    assert rig.replies == [B]
    assert rig.core.sleep_s() == 1
    rig.step_after(1)
    (error,) = rig.replies[1:]
    assert isinstance(error, Unavailable)
    assert "stalled" in str(error)
    assert f"{STALL_S:g} s" in str(error)
    assert rig.core.sleep_s() is None
    reading.set_result(scripted_adapter("stalled"))
    assert not rig.core.has_work()
    rig.step_after(0)
    assert (len(rig.replies), rig.executor.adapters) == (2, [A, B])


def test_a_slow_source_that_moves_is_waited_for(rig: Rig) -> None:
    reading = rig.start_hanging("b")
    for _ in range(5):
        rig.step_after(STALL_S - 1)
        rig.executor.advance["b"](1)
        assert rig.core.sleep_s() == STALL_S
    rig.executor.advance["b"](0)  # no byte
    rig.step_after(STALL_S - 1)
    assert rig.core.sleep_s() == 1
    reading.set_result(scripted_adapter("b"))
    rig.step_after(0)
    assert rig.replies == [B]


def test_a_load_that_is_ended_replies_at_once_and_adds_nothing(rig: Rig) -> None:
    reading = rig.start_hanging("b")
    rig.core.end_loading_adapter("b")
    assert [type(reply) for reply in rig.replies] == [Unavailable]
    with pytest.raises(LoadEnded):
        rig.executor.advance["b"](1)
    reading.set_result(scripted_adapter("b"))
    rig.core.step()
    rig.core.end_loading_adapter("b")  # it has ended already
    assert (len(rig.replies), rig.executor.adapters) == (1, [A])


def test_loads_beyond_the_limit_wait_in_order_and_their_time_does_not_run(rig: Rig) -> None:
    for index in range(MAX_LOADS):
        rig.start_hanging(f"s{index}")
    rig.start("b")
    rig.start("c")
    rig.core.end_loading_adapter("c")  # while it waits
    assert len(rig.replies) == 1
    rig.step_after(STALL_S - 1)
    assert len(rig.replies) == 1
    rig.step_after(1)
    rig.core.step()
    assert rig.replies[-1] == B
    assert [type(reply) for reply in rig.replies[:-1]] == [Unavailable] * (MAX_LOADS + 1)


def test_loads_are_refused_while_many_ended_ones_hang_in_their_sources(rig: Rig) -> None:
    hanging = []
    for index in range(MAX_STUCK):
        hanging.append(rig.start_hanging(f"s{index}"))
        rig.core.end_loading_adapter(f"s{index}")
    rig.start("b")
    assert isinstance(rig.replies[-1], Unavailable)
    assert f"the limit is {MAX_STUCK}" in str(rig.replies[-1])
    hanging[0].set_result(scripted_adapter("s0"))
    rig.core.step()
    rig.start("b")
    rig.core.step()
    assert rig.replies[-1] == B


def test_content_that_was_loaded_twice_leaves_when_it_is_unloaded_twice(rig: Rig) -> None:
    for _ in range(2):
        rig.start("b")
        rig.core.step()
    rig.core.unload_adapter(B, "b")
    rig.add("1", B)
    assert rig.run() == {"1": "length"}
    rig.core.unload_adapter(B, "b")
    rig.add("2", B)
    assert rig.run() == {"2": "error"}


def test_a_load_of_a_script_ends_without_progress_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.executor.preparing["b"] = Future()
    monkeypatch.setattr(progress, "STALL_S", 0.0)
    with pytest.raises(Unavailable, match="gave no byte"):
        rig.core.load_adapter("b")


@pytest.fixture
def small() -> Rig:
    """Return a core with one adapter in memory, of which A, in folders a and copy/a, and B may be named."""
    rig = Rig(max_cpu_loras=1)
    for location in ("copy/a", "b"):
        rig.start(location)
        rig.core.step()
    assert rig.executor.adapters == [B]
    return rig


def hang(rig: Rig, folder: str) -> "Future[Any]":
    future = rig.executor.preparing[folder] = Future()
    return future


def test_a_request_for_an_adapter_that_left_the_memory_waits_alone_while_it_is_read(small: Rig) -> None:
    reading = hang(small, "copy/a")
    small.add("1", A)
    small.add("2", "")
    assert small.executor.adapters == []  # the place is free before the read begins
    assert small.run() == {"2": "length"}
    assert (small.core.stats().deferred, small.core.stats().waiting_adapters) == (1, [A])
    reading.set_result(scripted_adapter("copy/a"))
    assert small.run() == {"1": "length"}
    assert small.executor.adapters == [A]


def test_an_adapter_leaves_the_memory_for_the_first_that_waits_even_if_more_requests_for_it_come(small: Rig) -> None:
    small.add("1", B)
    small.core.step()
    small.add("2", A)
    small.add("3", B)
    small.add("4", "")
    assert small.executor.adapters == [B]
    ended = []
    while small.core.has_work():
        ended += [out.request_id for out in small.core.step().outputs if out.finish_reason is not None]
    assert ended == ["1", "4", "2", "3"]


def test_one_folder_with_the_right_content_is_enough(small: Rig) -> None:
    hang(small, "copy/a").set_result(scripted_adapter("b"))  # it was rewritten
    small.add("1", A)
    assert small.run() == {"1": "length"}
    assert small.executor.adapters == [A]


def test_requests_for_an_adapter_that_is_nowhere_any_more_end_alone(small: Rig) -> None:
    hang(small, "copy/a").set_result(scripted_adapter("b"))
    hang(small, "a").set_exception(StartupError("adapter a: there is no such folder."))
    small.add("1", A)
    small.add("2", B)
    outputs = []
    while small.core.has_work():
        outputs += [out for out in small.core.step().outputs if out.finish_reason is not None]
    assert {out.request_id: out.finish_reason for out in outputs} == {"1": "error", "2": "length"}
    (error,) = (out.error for out in outputs if out.error is not None)
    assert error.kind == "unavailable"
    assert "no such folder" in error.message


def test_an_abort_ends_the_read_that_no_other_request_waits_for(small: Rig) -> None:
    reading = hang(small, "copy/a")
    for request_id in ("1", "2"):
        small.add(request_id, A)
    small.core.abort("1")
    small.executor.advance["copy/a"](1)
    small.core.abort("2")
    with pytest.raises(LoadEnded):
        small.executor.advance["copy/a"](1)
    reading.set_result(scripted_adapter("copy/a"))
    assert small.run() == {"1": "abort", "2": "abort"}
    small.add("3", B)
    assert small.run() == {"3": "length"}


def test_an_unloaded_folder_is_not_read_again(small: Rig) -> None:
    small.core.unload_adapter(A, "copy/a")
    hang(small, "copy/a")
    small.add("1", A)
    assert small.run() == {"1": "length"}


def test_a_request_that_waits_for_its_adapter_still_gets_it_after_an_unload(small: Rig) -> None:
    small.core.unload_adapter(A, "a")
    reading = hang(small, "copy/a")
    small.add("1", A)
    small.core.unload_adapter(A, "copy/a")
    small.add("2", A)
    reading.set_result(scripted_adapter("copy/a"))
    assert small.run() == {"1": "length", "2": "error"}
    assert small.executor.adapters == []


def test_a_sleep_drops_reads_and_adapters_are_read_again_after_it(small: Rig) -> None:
    hang(small, "copy/a")
    small.add("1", A)
    small.core.call("sleep", ["weights"])
    assert small.run() == {"1": "abort"}
    small.core.call("wake_up", ["weights"])
    small.executor.adapters.clear()
    del small.executor.preparing["copy/a"]
    for request_id, adapter in (("2", A), ("3", B)):
        small.add(request_id, adapter)
    assert small.run() == {"2": "length", "3": "length"}


def test_a_stall_moves_on_to_the_next_folder(small: Rig) -> None:
    hang(small, "copy/a")
    small.add("1", A)
    small.step_after(STALL_S)
    assert small.run() == {"1": "length"}
