from concurrent.futures import Future

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.loop.engine_core import EngineCore
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.kv_stream import numbers
from octavo_engine.wire.plan import StepCosts, StepPlan, StepResult
from octavo_engine.wire.records import EngineRequest, SeqOutput
from octavo_testing.scripted import EOS, ScriptedExecutor, scripted, text_ids


class Clock:
    """A clock whose readings are a millisecond apart."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def make_core(executor=None, *, kv_events=False, **limits):
    config = SchedulerConfig(**{"max_model_len": 128, "num_blocks": 32, **limits}, debug_invariants=True)
    return EngineCore(Scheduler(config, kv_events=kv_events), executor or ScriptedExecutor(), clock=Clock())


def make_request(request_id="r", prompt="hello", *, params=None, tenant=""):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=text_ids(prompt),
        params=params or scripted("answer"),
        eos_token_id=EOS,
        tenant=tenant,
    )


def run(core: EngineCore) -> list[SeqOutput]:
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    return outputs


def ends(outputs):
    return [(o.request_id, o.index, o.finish_reason) for o in outputs if o.finish_reason is not None]


def test_a_request_runs_to_its_end():
    core = make_core()
    core.add(make_request())
    outputs = run(core)
    assert [t for o in outputs for t in o.token_ids] == text_ids("answer", eos=True)
    assert ends(outputs) == [("r", 0, "stop")]
    assert core.stats().in_use_blocks == 0


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_messages_that_end_a_step_have_what_changed_for_each_tenant(steps_ahead):
    core, interim, totals = make_core(kv_events=True, steps_ahead=steps_ahead), [], {}
    core.on_interim = interim.append
    core.add(make_request("a", tenant="alice", params=scripted("x", "longer", n=2)))
    core.add(make_request("b", tenant="bob"))
    core.add(make_request("c", tenant="bob", params=scripted("cut")))
    while core.has_work():
        stats = core.step().stats
        for name, usage in stats.tenants.items():
            counts = (usage.running, usage.prompt_tokens, usage.generation_tokens)
            totals[name] = [sum(pair) for pair in zip(totals.get(name, (0, 0, 0)), counts, strict=True)]
        assert sum(generated for _, _, generated in totals.values()) == stats.generation_tokens
        if stats.generation_tokens > 5:
            core.abort("c")
    assert totals == {"alice": [0, 5, 2 + 7], "bob": [0, 2 * 5, stats.generation_tokens - 9]}
    assert stats.generation_tokens - 9 < len("answer") + 1 + len("cut") + 1
    assert interim
    assert not any(outputs.stats.tenants for outputs in interim)


def test_each_index_ends_once():
    core = make_core()
    core.add(make_request("a", params=scripted("x", "long answer", n=2)))
    core.add(make_request("b"))
    assert sorted(ends(run(core))) == [("a", 0, "stop"), ("a", 1, "stop"), ("b", 0, "stop")]


def test_an_idle_core_has_no_work():
    core = make_core()
    assert not core.has_work()
    assert core.step().outputs == []


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("index", [None, 0, 1])
def test_abort_ends_what_it_names_and_frees_it(steps_before, index):
    core = make_core()
    core.add(make_request(params=scripted("x" * 30, "y" * 30, n=2)))
    outputs = [out for _ in range(steps_before) for out in core.step().outputs]
    core.abort("r", index)
    core.abort("r", index)
    outputs += run(core)
    reasons = {i: "abort" if index in (None, i) else "stop" for i in range(2)}
    assert sorted(ends(outputs)) == [("r", i, reasons[i]) for i in range(2)]
    assert core.stats().in_use_blocks == 0


def test_abort_of_an_unknown_request_is_ignored():
    core = make_core()
    core.abort("nobody")
    assert not core.has_work()


def test_a_request_that_can_never_run_ends_with_an_error_for_each_index():
    core = make_core()
    core.add(make_request(prompt="x" * 200, params=scripted("x", n=2)))
    outputs = run(core)
    assert ends(outputs) == [("r", 0, "error"), ("r", 1, "error")]
    assert outputs[0].error.kind == "invalid_request"
    assert "maximum context length is 128" in outputs[0].error.message


def test_a_failed_step_ends_its_sequences_and_the_core_keeps_serving(caplog):
    core = make_core()
    core.add(make_request("bad", params=scripted("abc", extra_args={"fail_at": 1})))
    assert ends(run(core)) == [("bad", 0, "error")]
    assert "scripted failure" in caplog.text
    core.add(make_request("good"))
    assert ends(run(core)) == [("good", 0, "stop")]
    assert core.stats().in_use_blocks == 0


def test_a_lost_executor_raises_engine_dead():
    class Lost(ScriptedExecutor):
        def submit(self, plan: StepPlan) -> Future[StepResult]:
            raise EngineDead("worker 1 is gone")

    core = make_core(Lost())
    core.add(make_request())
    with pytest.raises(EngineDead, match="worker 1"):
        core.step()


def test_an_executor_that_is_lost_between_two_plans_wakes_the_core():
    executor, woken = ScriptedExecutor(), []
    core = make_core(executor)
    core.on_more_work(lambda: woken.append(True))
    assert not core.has_work()
    executor.lose(EngineDead("rank 1 is gone"))
    assert woken == [True]
    assert core.has_work()
    with pytest.raises(EngineDead, match="rank 1"):
        core.step()


def test_costs_of_a_step_are_inputs_of_the_next():
    class Costly(ScriptedExecutor):
        def submit(self, plan: StepPlan) -> Future[StepResult]:
            future = super().submit(plan)
            future.result().costs = StepCosts(prefill_token_s=float(plan.step_id))
            return future

    core = make_core(Costly())
    seen = []
    scheduler_step = core._scheduler.step
    core._scheduler.step = lambda now, costs: seen.append(costs.prefill_token_s) or scheduler_step(now, costs)
    core.add(make_request())
    run(core)
    assert seen[0] == 0.0
    assert seen[1:] == sorted(set(seen[1:]))


def test_stats_carry_the_time_of_the_step():
    core = make_core()
    core.add(make_request())
    stats = core.step().stats
    assert stats.step_s == pytest.approx(0.002)
    assert (stats.running, stats.steps) == (1, 1)


def test_pressure_from_more_requests_than_blocks_loses_none():
    core = make_core(num_blocks=9, num_host_blocks=4, max_num_seqs=8)
    for i in range(40):
        core.add(make_request(f"r{i}", f"prompt {i}", params=scripted(f"the answer to {i} is long " * 2)))
    outputs = run(core)
    assert sorted(ends(outputs)) == sorted((f"r{i}", 0, "stop") for i in range(40))
    for i in range(40):
        tokens = [t for o in outputs if o.request_id == f"r{i}" for t in o.token_ids]
        assert tokens == text_ids(f"the answer to {i} is long " * 2, eos=True)
    assert core.stats().preemptions > 0


def test_shutdown_reaches_the_executor():
    executor = ScriptedExecutor()
    make_core(executor).shutdown()
    assert executor.is_shut_down


def test_block_changes_are_published_before_a_step_runs():
    """A router that gets them afterwards would route requests to blocks that are overwritten, or miss new blocks."""
    published = []

    class Watched(ScriptedExecutor):
        def submit(self, plan):
            published.append("runs")
            return super().submit(plan)

    def on_interim(outputs):
        load = (outputs.stats.running, outputs.stats.prefill_backlog_tokens, outputs.stats.batched_tokens)
        published.append((load, (len(numbers(outputs.kv.stored)), len(numbers(outputs.kv.removed)))))

    core = make_core(Watched(), num_blocks=4, block_size=4, max_model_len=16, kv_events=True)
    core.on_interim = on_interim
    core.add(make_request("fills", "0123456789ab", params=scripted("x")))
    ended = core.step()
    assert published == [((1, 11, 0), (3, 0)), "runs"]
    assert (ended.kv, ended.stats.prefill_backlog_tokens, ended.stats.batched_tokens) == (None, 0, 13)
    run(core)
    published.clear()
    core.add(make_request("evicts", "abcdefghijkl", params=scripted("x")))
    run(core)
    assert published[:2] == [((1, 11, 1), (3, 2)), "runs"]  # one of the four blocks was free


def test_a_reset_is_published_before_its_answer():
    """After the answer, a snapshot contains none of the old blocks."""
    published = []
    core = make_core(num_blocks=4, block_size=4, max_model_len=16, kv_events=True)
    core.on_interim = lambda outputs: published.append(len(numbers(outputs.kv.removed)))
    core.add(make_request("fills", "0123456789ab", params=scripted("x")))
    run(core)
    published.clear()
    assert core.call("reset_prefix_cache") is True
    assert published == [3]


def test_received_requests_are_counted_including_refused_ones():
    core = make_core()
    core.add(make_request("fits"))
    core.add(make_request("bad", "x" * 200))
    assert core.stats().received == 2
    run(core)
    core.add(make_request("next"))
    core.abort("next")
    assert core.step().stats.received == 3


def test_a_step_of_decodes_publishes_no_interim_outputs():
    published = []
    core = make_core(num_blocks=8, block_size=16, kv_events=True)
    core.on_interim = published.append
    core.add(make_request("r", "abc", params=scripted("four")))
    run(core)
    assert [outputs.stats.prefill_backlog_tokens for outputs in published] == [2]


def test_blocks_of_a_failed_step_are_published_as_removed():
    class Failing(ScriptedExecutor):
        def submit(self, plan):
            raise RuntimeError("out of luck")

    published = []
    core = make_core(Failing(), num_blocks=4, block_size=4, max_model_len=16, kv_events=True)
    core.on_interim = lambda outputs: published.append(outputs.kv.stored)
    core.add(make_request("r", "0123456789ab"))
    assert core.step().kv.removed == published[0] != b""
