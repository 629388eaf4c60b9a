"""A request that waits for its grammar or adapter is overtaken, keeps its place in the queue, replays from a trace."""

from dataclasses import replace

import pytest
from octavo_engine.core.replay import replay
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.wire.plan import SeqResult, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest, ErrorInfo
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.simulation import sim_config

EOS = 99


def request(name, *, grammar="g", **fields):
    params = SamplingParams(**{"max_tokens": 2, "seed": 0, **fields})
    return EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], params=params, grammar=grammar, eos_token_id=EOS)


def result(plan: StepPlan, token=5):
    return StepResult(
        step_id=plan.step_id, seqs=[SeqResult(seq_id=s.seq_id, token_ids=[token]) for s in plan.seqs if s.sample]
    )


@pytest.fixture
def scheduler():
    return Scheduler(sim_config(max_num_seqs=1))


def names(scheduler, plan):
    requests = {seq.seq_id: seq.request_id for seq in scheduler.sequences()}
    return [requests[step.seq_id] for step in plan.seqs]


def test_a_deferred_request_is_overtaken_and_keeps_its_place(scheduler):
    scheduler.add(request("slow"), 0.0, deferred=True)
    for name in ("a", "b"):
        scheduler.add(request(name, grammar=None), 0.0)
    plan = scheduler.step(1.0)
    assert names(scheduler, plan) == ["a"]
    scheduler.prepared("slow", 1.5)
    scheduler.commit(result(plan, EOS), 2.0)
    assert names(scheduler, scheduler.step(3.0)) == ["slow"]


def test_only_deferred_requests_mean_no_work(scheduler):
    scheduler.add(request("slow"), 0.0, deferred=True)
    assert not scheduler.has_work()
    assert scheduler.step(1.0).is_empty
    scheduler.prepared("slow", 2.0)
    assert scheduler.has_work()
    plan = scheduler.step(3.0)
    assert plan.new_seqs[0].grammar == "g"


def test_stats_and_reasons_cover_deferred_requests(scheduler):
    scheduler.add(request("a", grammar=None), 0.0)
    scheduler.add(request("slow"), 0.0, deferred=True)
    scheduler.add(request("b", grammar=None), 0.0)
    scheduler.step(1.0)
    reasons = [scheduler.waiting_reason(name) for name in ("a", "slow", "b")]
    assert reasons == [None, "grammar", "max_num_seqs"]
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.deferred) == (1, 2, 1)
    assert [seq.status for seq in scheduler.sequences()] == ["running", "waiting", "deferred"]


def test_a_failed_grammar_ends_every_output_once(scheduler):
    scheduler.add(request("slow", n=1), 0.0, deferred=True)
    error = ErrorInfo("too large", "invalid_request")
    (ended,) = scheduler.prepared("slow", 1.0, error=error)
    assert (ended.finish_reason, ended.error) == ("error", error)
    assert scheduler.prepared("slow", 2.0) == []
    assert not scheduler.is_live("slow")


def test_an_abort_leaves_no_deferred_state(scheduler):
    scheduler.add(request("slow"), 0.0, deferred=True)
    (ended,) = scheduler.abort("slow")
    assert ended.finish_reason == "abort"
    assert scheduler.prepared("slow", 1.0) == []
    assert scheduler.stats().deferred == 0


def test_part_of_a_deferred_request_may_be_aborted():
    scheduler = Scheduler(sim_config(max_num_seqs=4))
    scheduler.add(request("slow", n=3), 0.0, deferred=True)
    assert [out.index for out in scheduler.abort("slow", 1)] == [1]
    scheduler.prepared("slow", 1.0)
    assert len(scheduler.step(2.0).seqs) == 2


def test_a_fork_waits_with_its_parent(scheduler):
    scheduler.add(request("slow"), 0.0, deferred=True)
    scheduler.fork(scheduler.sequences()[0].seq_id)
    assert scheduler.stats().deferred == 2
    scheduler.prepared("slow", 1.0)
    assert scheduler.stats().deferred == 0


def test_the_grammar_alone_decides_the_end(scheduler):
    """Neither `ignore_eos` nor `min_tokens` prevents an end token from ending it: the masks enforce both."""
    scheduler.add(request("r", min_tokens=2, ignore_eos=True), 0.0)
    outputs = scheduler.commit(result(scheduler.step(1.0), EOS), 2.0)
    assert outputs[0].finish_reason == "stop"


def test_a_preempted_sequence_is_announced_with_grammar_and_tokens():
    scheduler = Scheduler(sim_config(num_blocks=4, block_size=4, max_num_seqs=2, enable_prefix_caching=False))
    for name in ("first", "second"):
        scheduler.add(request(name, max_tokens=12), 0.0)
    plans = []
    while scheduler.has_work():
        plans.append(scheduler.step(1.0))
        scheduler.commit(result(plans[-1]), 1.0)
    assert scheduler.stats().preemptions
    resumed = [new for plan in plans for new in plan.new_seqs if len(new.token_ids) > 3]
    assert resumed
    assert all(new.grammar == "g" and new.num_prompt_tokens == 3 for new in resumed)


def test_readiness_is_an_input_of_a_replay():
    lines: list[str] = []
    scheduler = TracingScheduler(sim_config(max_num_seqs=1), lines.append)
    scheduler.add(request("slow"), 0.0, deferred=True)
    scheduler.add(request("never"), 0.0, deferred=True)
    scheduler.add(request("a", grammar=None), 0.0)
    for now, event in enumerate(("", "slow", "never", "", "", "")):
        plan = scheduler.step(float(now))
        if event:
            scheduler.prepared(event, float(now), error=ErrorInfo("late") if event == "never" else None)
        if not plan.is_empty:
            scheduler.commit(result(plan), float(now))
    assert not scheduler.has_work()
    report = replay(lines)
    assert report.ok, str(report)
    assert report.stats == scheduler.stats()
    without = [line for line in lines if '"prepared":"slow"' not in line]
    assert not replay(without).ok


def test_a_step_has_few_adapters_and_only_requests_without_one_overtake() -> None:
    scheduler = Scheduler(sim_config(max_loras=2))
    for name, adapter in (("a", "A"), ("b", "B"), ("c", "C"), ("a2", "A"), ("base", ""), ("c2", "C")):
        scheduler.add(replace(request(name, grammar=None), adapter=adapter), 0.0)
    plans = [scheduler.step(1.0)]
    assert names(scheduler, plans[0]) == ["a", "b", "base"]
    assert scheduler.waiting_reason("c") == "max_loras"
    scheduler.commit(result(plans[0], EOS), 2.0)
    assert names(scheduler, scheduler.step(3.0)) == ["c", "a2", "c2"]
