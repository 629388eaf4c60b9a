"""Steps limited by time: a long prompt holds up no other request, and loses little by it. Times are virtual."""

import statistics

import pytest
from octavo_engine.core.replay import replay
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.wire.plan import StepCosts
from octavo_testing.simulation import Simulation, sim_config
from octavo_testing.timed_steps import Arrival, TimedSteps, timed_steps

LIMIT_MS = 200.0
LONG, SHORT = 60_000, 20
#: Two shared cores with a model of 135M parameters, measured; and a model of 8B on a server, estimated.
SMALL = StepCosts(step_s=0.06, prefill_token_s=0.004, context_token_s=1.9e-6)
LARGE = StepCosts(step_s=0.15, prefill_token_s=0.005, context_token_s=3e-7)
COSTS = StepCosts(step_s=0.02, prefill_token_s=0.001, context_token_s=1e-6)


def run_long_prompt(machine: StepCosts, max_step_ms: float) -> TimedSteps:
    """Run a long prompt, beside which a short one arrives every minute."""
    run = timed_steps(machine, noise=0.1, max_step_ms=max_step_ms)
    run.run([Arrival(0.0, [1] * LONG, 1), *(Arrival(7.0 + 60 * i, [2] * SHORT, 8) for i in range(10))])
    return run


@pytest.mark.parametrize(("machine", "limit_s"), [(SMALL, LIMIT_MS / 1000), (LARGE, 2 * LARGE.step_s)])
def test_short_prompts_behind_a_prompt_of_60k_tokens(machine: StepCosts, limit_s: float) -> None:
    run, unlimited = run_long_prompt(machine, LIMIT_MS), run_long_prompt(machine, 0.0)
    assert max(request.steps_to_first for request in run.requests[1:]) <= 2
    mixed = [step.seconds for step in run.steps if step.chunks and step.num_seqs > 1]
    assert statistics.quantiles(mixed, n=20)[-1] <= 1.5 * limit_s
    assert unlimited.requests[0].prompt_s >= 0.9 * run.requests[0].prompt_s
    assert max(request.steps_to_first for request in unlimited.requests[1:]) > 20  # what the limit is for


def test_a_short_prompt_behind_several_long_ones_starts_at_once() -> None:
    run = timed_steps(COSTS, max_step_ms=LIMIT_MS)
    run.run([*(Arrival(0.0, [i] * 4000, 1) for i in range(3)), Arrival(1.0, [9] * SHORT, 1)])
    assert run.requests[3].steps_to_first <= 2


def test_a_short_prompt_starts_within_two_steps_on_a_machine_that_is_too_slow_for_the_limit() -> None:
    run = timed_steps(StepCosts(step_s=0.15, prefill_token_s=0.03, context_token_s=4e-6), max_step_ms=LIMIT_MS)
    run.run([Arrival(0.0, [1] * 2000, 1), Arrival(10.0, [9] * SHORT, 1)])
    assert run.requests[1].steps_to_first <= 2


def test_many_short_prompts_finish_in_the_order_of_their_arrival() -> None:
    run = timed_steps(COSTS, max_step_ms=LIMIT_MS)
    run.run([Arrival(0.0, [i] * 100, 1) for i in range(20)])
    firsts = [request.first_token_s for request in run.requests]
    assert firsts == sorted(firsts)
    assert firsts[2] < 0.6  # not all side by side: they would all end last, after 2.5 s


def test_streams_go_on_beside_a_long_prompt() -> None:
    run = timed_steps(COSTS, max_step_ms=LIMIT_MS)
    run.run([*(Arrival(0.0, [i] * 10, 200) for i in range(8)), Arrival(1.0, [9] * 4000, 1)])
    mixed = [step for step in run.steps if step.chunks and step.num_seqs > 1]
    assert max(step.seconds for step in mixed[1:]) <= 1.5 * LIMIT_MS / 1000
    assert all(step.num_seqs >= 8 for step in run.steps if 8 in step.chunks)


def test_unmeasured_costs_are_measured_with_a_small_chunk() -> None:
    sim = Simulation(max_step_ms=LIMIT_MS, max_model_len=1024, num_blocks=300, max_num_batched_tokens=512)
    sim.add("a", [1] * 300)
    assert sim.tick().num_tokens == 128
    sim.costs = COSTS
    assert 128 < sim.tick().num_tokens < 180


@pytest.mark.parametrize("off", [{"max_step_ms": 0.0}, {"max_step_ms": 9.0, "enable_chunked_prefill": False}])
def test_without_a_limit_the_first_prompt_takes_the_whole_step(off: dict[str, object]) -> None:
    sim = Simulation(costs=COSTS, max_model_len=64, num_blocks=40, max_num_batched_tokens=64, **off)
    sim.add("long", [1] * 60)
    sim.add("short", [2] * 8)
    assert sim.tick().seqs[0].num_tokens == 60


def test_the_threshold_and_the_time_both_limit_a_chunk() -> None:
    limits = {"max_model_len": 1024, "num_blocks": 300, "max_num_batched_tokens": 512, "max_step_ms": LIMIT_MS}
    sim = Simulation(costs=COSTS, long_prefill_token_threshold=40, **limits)
    sim.add("a", [1] * 300)
    sim.add("b", [2] * 300)
    assert sorted(step.num_tokens for step in sim.tick().seqs) == [40, 40]
    sim = Simulation(costs=COSTS, long_prefill_token_threshold=400, **limits)
    sim.add("a", [1] * 300)
    sim.add("b", [2] * 300)
    assert all(step.num_tokens <= 140 for step in sim.tick().seqs)


def test_a_request_that_cannot_be_admitted_takes_no_time_from_the_first_prompt() -> None:
    costs = StepCosts(step_s=0.02, prefill_token_s=0.01)
    sim = Simulation(costs=costs, max_step_ms=100.0, max_model_len=256, num_blocks=64, max_num_batched_tokens=512)
    sim.add("fills", [1] * 200)
    assert sim.tick().num_tokens == 30  # 15 times the time of an empty step
    sim.add("waits", [2] * 200)
    assert sim.tick().num_tokens == 30
    assert sim.scheduler.waiting_reason("waits") == "capacity"


def test_prompts_with_one_prefix_compute_it_once_between_them() -> None:
    sim = Simulation(costs=COSTS, max_step_ms=LIMIT_MS, max_model_len=1024, num_blocks=300, max_num_batched_tokens=512)
    prefix = [i % 50 for i in range(400)]
    for i in range(4):
        sim.add(f"r{i}", [*prefix, i, i], max_tokens=2)
    computed = 0
    while sim.scheduler.has_work():
        computed += sum(step.num_tokens for step in sim.tick().seqs)
    assert computed < 480  # of 1608: each computes its last block, and chunks may overlap within a block
    sim.verify()
    assert sum(received.last.num_cached_tokens for received in sim.received.values()) >= 1608 - 480


def test_drafts_for_a_prompt_that_is_not_computed_yet_are_dropped() -> None:
    sim = Simulation(max_step_ms=LIMIT_MS, max_num_batched_tokens=4)
    sim.add("r", [1] * 6)
    sim.tick()
    sim.add("s", [2] * 6)
    sim.scheduler.propose(sim.live[0].seq_id, [1, 2, 3])
    sim.drain()
    sim.verify()


def test_a_trace_of_shared_steps_replays() -> None:
    lines: list[str] = []
    slow = StepCosts(step_s=0.02, prefill_token_s=0.004, context_token_s=1e-5)
    config = sim_config(max_step_ms=30.0, num_blocks=40, max_num_batched_tokens=24)
    sim = Simulation(scheduler=TracingScheduler(config, lines.append), costs=slow)
    for i in range(8):
        sim.add(f"r{i}", [i % 3] * (10 + 5 * i))
        sim.tick()
    sim.drain()
    sim.verify()
    assert replay(lines).ok
    assert not replay([lines[0].replace('"max_step_ms":30.0', '"max_step_ms":0.0'), *lines[1:]]).ok


def test_rows_with_log_probabilities_take_no_more_than_the_time_of_a_step() -> None:
    costs = StepCosts(step_s=0.02, prefill_token_s=1e-5, logprob_row_s=0.004)
    sim = Simulation(costs=costs, max_step_ms=LIMIT_MS, max_model_len=1024, num_blocks=300, max_num_batched_tokens=512)
    sim.add("plain", [1] * 300)
    for i in range(3):
        sim.add(f"r{i}", [2 + i] * 200, prompt_logprobs=1)
    rows = []
    while sim.scheduler.has_work():
        rows.append(sum(step.num_prompt_logprobs for step in sim.tick().seqs))
    assert sum(rows) == 3 * 199
    assert max(rows) * costs.logprob_row_s <= LIMIT_MS / 1000 + 3 * costs.logprob_row_s
    assert len(rows) < 60
    sim.verify()
