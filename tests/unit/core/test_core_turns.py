"""Waiting requests start in the order of their turns; requests without turns start in the order of arrival."""

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams


def scheduler(policy="fcfs"):
    return Scheduler(SchedulerConfig(max_model_len=64, num_blocks=16, block_size=4, max_num_seqs=1, policy=policy))


def add(core, name, **fields):
    params = SamplingParams(max_tokens=4, temperature=0)
    core.add(EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], params=params, **fields), 0.0)


def start_order(core):
    """Return the order in which requests get the only place."""
    order = []
    while core.has_work():
        core.step(0.0)
        (running,) = [seq.request_id for seq in core._state.running]
        order.append(running)
        core.abort(running)
    return order


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_turns_come_before_arrival(policy):
    core = scheduler(policy)
    for name, turn in (("a", 3.0), ("b", 2.0), ("c", 1.0), ("d", 1.0)):
        add(core, name, turn=turn)
    assert start_order(core) == ["c", "d", "b", "a"]


def test_requests_without_turns_start_in_the_order_of_arrival():
    core = scheduler()
    for name in "abc":
        add(core, name)
    assert start_order(core) == ["a", "b", "c"]


def test_priority_comes_before_turns():
    core = scheduler("priority")
    for name, priority, turn in (("a", 1, 1.0), ("b", 0, 9.0), ("c", -1, 9.0)):
        add(core, name, priority=priority, turn=turn)
    assert start_order(core) == ["c", "b", "a"]


def test_a_request_waits_until_it_is_scheduled():
    core = scheduler()
    add(core, "a")
    add(core, "b")
    assert core.is_waiting("a")
    core.step(0.0)
    assert (core.is_waiting("a"), core.is_waiting("b"), core.is_waiting("unknown")) == (False, True, False)
