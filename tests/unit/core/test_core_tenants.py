"""Tenants share places, blocks and steps: who is served first, who gives back what, and what stays."""

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.core.sequence import Sequence
from octavo_engine.core.tenants import MAX_IDLE, Tenants
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.simulation import Simulation, sim_config


def one_place(policy: str = "fcfs") -> Scheduler:
    config = SchedulerConfig(max_model_len=64, num_blocks=16, block_size=4, max_num_seqs=1, policy=policy)  # type: ignore[arg-type]
    return Scheduler(config)


def add(core: Scheduler, name: str, **fields: object) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    core.add(EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], params=params, **fields), 0.0)  # type: ignore[arg-type]


def start_order(core: Scheduler) -> list[str]:
    """Return the order in which requests get the only place."""
    order = []
    while core.has_work():
        core.step(0.0)
        (running,) = [seq.request_id for seq in core._state.running]
        order.append(running)
        core.abort(running)
    return order


def running(sim: Simulation) -> list[str]:
    return sorted(seq.request_id for seq in sim.scheduler._state.running)


def find(sim: Simulation, request_id: str) -> Sequence:
    (seq,) = [seq for seq in sim.live if seq.request_id == request_id]
    return seq


def test_requests_of_one_tenant_start_in_the_order_of_arrival() -> None:
    core = one_place()
    for name, arrival_s in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 2.0)):
        add(core, name, arrival_s=arrival_s)
    assert start_order(core) == ["b", "c", "d", "a"]


def test_many_requests_of_one_tenant_do_not_delay_the_first_one_of_another() -> None:
    core = one_place()
    for number in range(5):
        add(core, f"a{number}", tenant="a")
    core.step(0.0)
    add(core, "b", tenant="b")
    core.abort("a0")
    assert "b" in start_order(core)[:2]


def test_a_tenant_of_twice_the_weight_starts_twice_as_often() -> None:
    core = one_place()
    for number in range(12):
        add(core, f"a{number}", tenant="a")
        add(core, f"b{number}", tenant="b", weight=2.0)
    assert sorted(name[0] for name in start_order(core)[:9]) == ["a"] * 3 + ["b"] * 6


def test_priority_comes_before_the_service_that_tenants_got() -> None:
    core = one_place("priority")
    for name, priority, tenant in (("a", 1, "x"), ("b", 0, "y"), ("c", -1, "y")):
        add(core, name, priority=priority, tenant=tenant)
    assert start_order(core) == ["c", "b", "a"]


def test_a_request_waits_until_it_is_scheduled() -> None:
    core = one_place()
    add(core, "a")
    add(core, "b")
    assert core.is_waiting("a")
    core.step(0.0)
    assert (core.is_waiting("a"), core.is_waiting("b"), core.is_waiting("unknown")) == (False, True, False)


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e10, float("nan")])
def test_a_weight_out_of_bounds_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequest, match=r"above 0 and at most 1e\+09"):
        add(one_place(), "a", weight=weight)


def test_a_tenant_without_a_place_takes_back_the_latest_sequence() -> None:
    sim = Simulation(max_num_seqs=4)
    for number in range(4):
        sim.add(f"a{number}", [number] * 4, tenant="a", max_tokens=20)
    sim.tick()
    sim.add("b", [9] * 4, tenant="b", max_tokens=8)
    plan = sim.tick()
    assert running(sim) == ["a0", "a1", "a2", "b"]
    assert find(sim, "b").seq_id in {step.seq_id for step in plan.seqs if step.sample}
    sim.drain()
    sim.verify()


def test_a_tenant_with_a_place_takes_back_up_to_its_share_once_the_other_leads_by_a_step() -> None:
    sim = Simulation(max_num_seqs=4, max_num_batched_tokens=16, num_blocks=64)
    for number in range(4):
        sim.add(f"a{number}", [number] * 4, tenant="a", max_tokens=40)
    sim.tick()
    for number in range(4):
        sim.add(f"b{number}", [9 - number] * 4, tenant="b", max_tokens=40)
    sim.tick()
    assert running(sim) == ["a0", "a1", "a2", "b0"]
    tenants = sim.scheduler._state.tenants.active
    while running(sim) == ["a0", "a1", "a2", "b0"]:
        lead = tenants["a"].counter - tenants["b"].counter
        sim.tick()
    assert 16 <= lead < 16 + 8
    assert running(sim) == ["a0", "a1", "b0", "b1"]
    sim.drain()
    sim.verify()


def test_the_only_sequence_of_a_tenant_stays_and_takes_back_the_blocks_that_it_needs() -> None:
    sim = Simulation(num_blocks=48, max_num_seqs=16, max_model_len=160, max_num_batched_tokens=16, watermark=0.01)
    serial = 0
    for _ in range(60):
        for tenant in "ab":
            while sum(seq.group.tenant.name == tenant for seq in sim.live) < 6:
                sim.add(f"{tenant}{serial}", [serial % 50] * 12, tenant=tenant, max_tokens=20)
                serial += 1
        if serial >= 12 and "c" not in sim.requests:
            sim.add("c", [7] * 116, tenant="c", max_tokens=8)  # 60 % of the blocks
        sim.tick()
    last = sim.received["c", 0].last
    assert last is not None
    assert (last.finish_reason, last.num_preemptions) == ("length", 0)
    sim.drain()
    sim.verify()


def test_a_head_without_room_delays_only_tenants_that_are_a_step_ahead() -> None:
    sim = Simulation(num_blocks=20, max_model_len=80, max_num_batched_tokens=16)
    for number, tenant in enumerate("ab"):
        sim.add(tenant, [number] * 20, tenant=tenant, max_tokens=30)
    for _ in range(4):
        sim.tick()
    sim.add("large", [5] * 70, tenant="c", max_tokens=2)  # the others' only sequences stay
    sim.add("small", [6] * 4, tenant="d", max_tokens=2)
    sim.tick()
    assert running(sim) == ["a", "b", "small"]
    serial = 0
    while "large" not in running(sim):
        for tenant in "abd":
            if sum(seq.group.tenant.name == tenant for seq in sim.live) < 2:
                sim.add(f"{tenant}{(serial := serial + 1)}", [serial % 50] * 4, tenant=tenant, max_tokens=9)
        sim.tick()
        assert serial < 60, "the large prompt starves"
    sim.drain()
    sim.verify()


def test_a_worse_priority_takes_nothing_back() -> None:
    sim = Simulation(policy="priority", max_num_seqs=2)
    for number in range(2):
        sim.add(f"a{number}", [number] * 4, tenant="a", max_tokens=8)
    sim.tick()
    sim.add("b", [9] * 4, tenant="b", priority=1)
    sim.tick()
    assert running(sim) == ["a0", "a1"]


@pytest.mark.parametrize("caching", [True, False])
def test_outputs_above_the_share_are_cut_off_and_the_prompt_counts_once(caching: bool) -> None:
    sim = Simulation(max_num_seqs=8, num_blocks=64, enable_prefix_caching=caching, max_num_batched_tokens=64)
    sim.add("b", [9] * 4, tenant="b", max_tokens=40)
    sim.tick()
    sim.add("a", [1, 2, 3, 4] * 5, tenant="a", n=8, max_tokens=12)
    sim.tick()
    held = [seq for seq in sim.scheduler._state.running if seq.request_id == "a"]
    assert sum(len(seq.indices) for seq in held) == 7
    assert sim.scheduler.stats().waiting == 1
    sim.abort("a", 7 - 1)
    sim.drain()
    sim.verify()
    stats = sim.scheduler.stats()
    assert stats.prompt_tokens == 4 + 20
    assert stats.prefix_cache_queries == (24 if caching else 0)
    assert stats.prefix_cache_hits == 0
    assert {received.last.num_cached_tokens for received in sim.received.values() if received.last} == {0}


def test_a_tenant_that_comes_back_gets_no_credit_and_keeps_its_surplus() -> None:
    tenants = Tenants(sim_config())
    often, sometimes = tenants.enter("often", 1.0), tenants.enter("sometimes", 1.0)
    often.counter, sometimes.counter = 100.0, 40.0
    tenants.leave(sometimes)
    tenants.leave(often)
    assert tenants.enter("new", 1.0).counter == 100.0
    assert tenants.enter("sometimes", 1.0).counter == 100.0
    ahead = tenants.enter("ahead", 1.0)
    ahead.counter = 500.0
    tenants.leave(ahead)
    assert tenants.enter("ahead", 1.0).counter == 500.0


def test_a_bounded_number_of_idle_tenants_is_remembered() -> None:
    tenants = Tenants(sim_config())
    tenants.enter("", 1.0)
    for number in range(MAX_IDLE + 10):
        tenant = tenants.enter(f"t{number}", 1.0)
        tenant.counter += 5.0
        tenants.leave(tenant)
    assert (len(tenants.active), len(tenants._idle)) == (1, MAX_IDLE)
