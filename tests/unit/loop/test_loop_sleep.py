"""Sleep and wake-up of an engine core: requests end once, the cache is empty, memory is released and restored."""

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.process.main import answer
from octavo_engine.process.messages import Answered, Call, CallFailed
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.errors import InvalidRequest, Unavailable
from octavo_engine.wire.kv_stream import numbers
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sleep import check_enabled, check_mode, tags_of_level, tags_to_wake
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids

BOTH = ("weights", "kv_cache")


@pytest.fixture
def executor():
    return ScriptedExecutor()


@pytest.fixture
def core(executor):
    config = SchedulerConfig(max_model_len=64, num_blocks=16, block_size=4, max_num_seqs=2, debug_invariants=True)
    return EngineCore(Scheduler(config, kv_events=True), executor)


def request(request_id, **fields):
    params = scripted("a long answer", **fields)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=text_ids("0123456789"), params=params, eos_token_id=EOS
    )


def ends(outputs):
    return sorted((out.request_id, out.index, out.finish_reason) for out in outputs if out.finish_reason is not None)


def run(core):
    return [out for _ in iter(core.has_work, False) for out in core.step().outputs]


def test_sleep_ends_each_running_and_waiting_request_once(core, executor):
    removed = []
    core.on_interim = lambda outputs: removed.append(len(numbers(outputs.kv.removed)) if outputs.kv else 0)
    core.add(request("running", n=2))
    core.add(request("waiting"))
    core.step()
    removed.clear()
    assert core.call("sleep", ["kv_cache"]) is True
    assert ends(run(core)) == [("running", 0, "abort"), ("running", 1, "abort"), ("waiting", 0, "abort")]
    assert (core.stats().in_use_blocks, core.stats().cached_blocks, executor.released) == (0, 0, ["kv_cache"])
    assert sum(removed) > 0


def test_a_request_to_a_sleeping_core_fails_and_one_after_waking_runs(core):
    core.call("sleep", BOTH)
    core.add(request("early", n=2))
    outputs = run(core)
    assert ends(outputs) == [("early", 0, "error"), ("early", 1, "error")]
    assert "wake_up" in outputs[0].error.message
    core.call("wake_up", BOTH)
    core.add(request("late"))
    assert ends(run(core)) == [("late", 0, "stop")]


def test_sleeping_twice_and_waking_twice_change_nothing(core, executor):
    core.call("sleep", ["kv_cache"])
    core.call("sleep", BOTH)
    assert sorted(executor.released) == ["kv_cache", "weights"]
    core.call("wake_up", ["weights"])
    assert (executor.released, core.is_sleeping) == (["kv_cache"], True)
    core.call("wake_up", BOTH)
    core.call("wake_up", BOTH)
    assert (executor.released, core.is_sleeping) == ([], False)


def test_a_failed_reload_leaves_the_core_asleep_and_serving_calls(core, executor):
    core.call("sleep", BOTH)
    executor.lost.add("weights")
    failed = answer(core, Call(3, "wake_up", [*BOTH]))
    assert isinstance(failed, CallFailed)
    assert "scripted loss" in failed.message
    assert (core.is_sleeping, sorted(executor.released)) == (True, ["kv_cache", "weights"])
    executor.lost.clear()
    assert answer(core, Call(4, "wake_up", [*BOTH])) == Answered(4, True)
    assert not core.is_sleeping


def test_memory_that_cannot_be_allocated_is_no_bug(core, executor, monkeypatch):
    def restore(tag):
        raise MemoryError("12 GiB")

    core.call("sleep", ["kv_cache"])
    monkeypatch.setattr(executor, "restore", restore)
    with pytest.raises(Unavailable, match="12 GiB"):
        core.call("wake_up", BOTH)


def test_levels_tags_and_modes_are_checked():
    assert (tags_of_level(1), tags_of_level(2)) == (("kv_cache",), BOTH)
    assert (tags_to_wake(None), tags_to_wake(["kv_cache", "weights"]), tags_to_wake([])) == ([*BOTH], [*BOTH], [])
    for refused in (
        lambda: tags_of_level(0),
        lambda: tags_to_wake(["scheduling"]),
        lambda: check_mode("keep"),
        lambda: check_enabled(EngineConfig()),
    ):
        with pytest.raises(InvalidRequest):
            refused()
