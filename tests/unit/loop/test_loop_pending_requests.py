"""The engine core and work that requests wait for: others run, late work ends a request, results are freed."""

import math
import weakref
from concurrent.futures import Future

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.grammar.compiler import GrammarError
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.loop.pending_requests import PendingRequests, Work
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.records import EngineRequest, ErrorInfo
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids

LATE = ErrorInfo("late")


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


def test_a_request_waits_for_all_of_its_work_and_keeps_the_results() -> None:
    pending, first, second = PendingRequests(), Future[object](), Future[object]()
    woken: list[bool] = []
    pending.on_done = lambda: woken.append(True)
    pending.start("a", [work(first, deadline_s=5.0), work(second)])
    compiled = Compiled()
    alive = weakref.ref(compiled)
    first.set_result(compiled)
    del compiled
    assert (pending.pop_done(1.0), pending.futures(), pending.next_deadline_s()) == ([], [second], None)
    assert pending.pop_done(6.0) == []  # the first work was done in time
    second.set_result(None)
    assert woken == [True, True]
    assert pending.pop_done(7.0) == [("a", None)]
    del first
    assert alive() is not None
    pending.forget("a")
    assert alive() is None


@pytest.mark.parametrize("is_late", [False, True])
def test_the_first_failure_ends_a_request_that_waits_for_more(is_late: bool) -> None:
    pending, failing, hanging = PendingRequests(), Future[object](), Future[object]()
    pending.start("a", [work(hanging), work(failing, deadline_s=5.0)])
    pending.start("b", [work(hanging)])
    if not is_late:
        failing.set_exception(ValueError("broken"))
    ((request_id, error),) = pending.pop_done(6.0)
    assert (request_id, error) == ("a", LATE if is_late else ErrorInfo("broken", "invalid_request"))
    hanging.set_result(None)
    assert pending.pop_done(7.0) == [("b", None)]


def test_a_request_that_is_forgotten_while_it_waits_never_returns() -> None:
    pending, future = PendingRequests(), Future[object]()
    pending.start("a", [work(future, deadline_s=5.0)])
    pending.forget("a")
    future.set_result(None)
    assert (pending.pop_done(6.0), pending.next_deadline_s(), pending.futures()) == ([], None, [])


def work(future: "Future[object]", deadline_s: float = math.inf) -> Work:
    return Work(future, lambda error: ErrorInfo(str(error), "invalid_request"), deadline_s, LATE)
