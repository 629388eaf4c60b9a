"""A request that the engine has not started by its deadline is dropped, at any number of free places."""

from concurrent.futures import Future

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.records import EngineRequest
from octavo_testing.scripted import ScriptedExecutor, scripted

CONFIG = SchedulerConfig(max_model_len=64, num_blocks=16, block_size=4, max_num_seqs=2, debug_invariants=True)


class Core(EngineCore):
    def __init__(self, executor=None):
        self.now = 0.0
        super().__init__(Scheduler(CONFIG), executor or ScriptedExecutor(), clock=lambda: self.now)

    def request(self, name, *, n=1, start_by_s=None, grammar=None):
        params = scripted("abc", n=n, temperature=1)
        self.add(
            EngineRequest(
                request_id=name, prompt_token_ids=[1, 2], params=params, start_by_s=start_by_s, grammar=grammar
            )
        )

    def ended(self):
        outputs = self.step().outputs
        while self.has_work():
            outputs += self.step().outputs
        return {(out.request_id, out.index): out.finish_reason for out in outputs if out.finish_reason}


@pytest.fixture
def core():
    return Core()


def test_only_a_request_that_never_ran_is_dropped(core):
    core.request("runs", n=2, start_by_s=1.0)
    core.request("waits", start_by_s=1.0)
    core.step()
    core.now = 1.0
    assert core.ended() == {("runs", 0): "length", ("runs", 1): "length", ("waits", 0): "abort"}


def test_every_output_of_a_dropped_request_ends(core):
    core.request("waits", n=2, start_by_s=1.0)
    core.now = 1.0
    assert core.ended() == {("waits", 0): "abort", ("waits", 1): "abort"}


def test_a_place_freed_at_the_deadline_is_too_late(core):
    """The place of `runs` becomes free and the deadline passes between the same two steps."""
    core.request("runs", n=2)
    core.request("waits", start_by_s=1.0)
    core.request("patient", start_by_s=5.0)
    core.step()
    core.abort("runs")
    core.now = 2.0
    assert core.ended() == {("runs", 0): "abort", ("runs", 1): "abort", ("waits", 0): "abort", ("patient", 0): "length"}


def test_an_idle_core_sleeps_until_the_deadline_of_a_deferred_request():
    executor = ScriptedExecutor()
    executor.preparing["slow"] = Future()
    core = Core(executor)
    core.request("ran", start_by_s=0.5)
    core.ended()
    core.request("compiles", start_by_s=3.0, grammar="slow")
    assert not core.has_work()
    core.now = 1.0
    assert core.sleep_s() == 2.0
    core.now = 3.0
    assert core.ended() == {("compiles", 0): "abort"}
    assert core.sleep_s() is None
