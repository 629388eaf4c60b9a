"""The engine core and slow grammars: other requests run, late grammars fail, unused grammars are freed."""

import weakref
from concurrent.futures import Future

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.grammar.library import GrammarError
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.records import EngineRequest
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids


class Compiled:
    pass


class Rig:
    def __init__(self):
        self.now_s = 0.0
        self.executor = ScriptedExecutor()
        config = SchedulerConfig(max_model_len=128, num_blocks=32, debug_invariants=True)
        self.core = EngineCore(Scheduler(config), self.executor, clock=lambda: self.now_s, grammar_timeout_s=5.0)

    def add(self, request_id, grammar=None, **fields):
        if grammar is not None:
            self.executor.preparing.setdefault(grammar, Future())
        params = scripted("answer", **fields)
        self.core.add(
            EngineRequest(
                request_id=request_id, prompt_token_ids=text_ids("hi"), params=params, eos_token_id=EOS, grammar=grammar
            )
        )

    def compiles(self, grammar, compiled=None):
        self.executor.preparing[grammar].set_result(compiled or Compiled())

    def run(self):
        outputs = []
        while self.core.has_work():
            outputs += self.core.step().outputs
        return [(o.request_id, o.finish_reason, o.error) for o in outputs if o.finish_reason]


@pytest.fixture
def rig():
    return Rig()


def test_other_requests_run_while_a_grammar_is_compiled(rig):
    rig.add("shaped", "g")
    rig.add("plain")
    assert rig.run() == [("plain", "stop", None)]
    rig.compiles("g")
    assert rig.run() == [("shaped", "stop", None)]


def test_a_compiled_grammar_delays_no_request(rig):
    rig.executor.preparing["g"] = Future()
    rig.compiles("g")
    rig.add("shaped", "g")
    assert rig.run() == [("shaped", "stop", None)]


def test_an_idle_core_is_woken(rig):
    woken = []
    rig.core.on_more_work(lambda: woken.append(True))
    rig.add("shaped", "g")
    rig.core.step()
    assert not rig.core.has_work()
    rig.compiles("g")
    assert woken == [True]
    assert rig.core.has_work()


def test_a_request_whose_grammar_does_not_compile_fails_alone(rig):
    rig.add("shaped", "g", n=2)
    rig.add("plain")
    rig.executor.preparing["g"].set_exception(GrammarError("too many states"))
    ended = rig.run()
    assert sorted(reason for _, reason, _ in ended) == ["error", "error", "stop"]
    errors = [error for _, reason, error in ended if reason == "error"]
    assert all(error.kind == "invalid_request" and "too many states" in error.message for error in errors)


def test_a_slow_grammar_fails_with_the_limit(rig):
    rig.add("shaped", "g")
    assert rig.core.sleep_s() == 5.0
    rig.core.step()
    rig.now_s = 6.0
    assert rig.core.sleep_s() == 0.0
    (out,) = rig.core.step().outputs
    assert out.finish_reason == "error"
    assert out.error.kind == "internal"
    assert "5 s" in out.error.message
    assert rig.core.sleep_s() is None
    rig.compiles("g")
    assert rig.run() == []


def test_an_abort_during_compilation_ends_the_request(rig):
    rig.add("shaped", "g")
    rig.core.abort("shaped")
    rig.compiles("g")
    assert rig.run() == [("shaped", "abort", None)]
    assert rig.core.sleep_s() is None


def test_a_compiled_grammar_lives_as_long_as_its_requests(rig):
    compiled = Compiled()
    alive = weakref.ref(compiled)
    rig.add("a", "g")
    rig.compiles("g", compiled)
    del compiled
    rig.core.step()
    rig.executor.preparing.clear()
    assert alive() is not None
    rig.run()
    assert alive() is None


def test_a_duplicate_id_leaves_the_first_request_unchanged(rig):
    rig.add("a", "g")
    rig.add("a", "h")
    rig.compiles("g")
    assert [reason for _, reason, _ in rig.run()] == ["error", "stop"]
