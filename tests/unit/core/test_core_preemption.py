"""Preemption: the choice of victims, swap or recompute, and the cost of resuming."""

import pytest
from octavo_engine.core.sequence import Sequence
from octavo_engine.wire.plan import StepCosts
from octavo_testing.simulation import Simulation


def add_growing_requests(*, requests: int = 3, prompt: int = 8, max_tokens: int = 12, **config: object) -> Simulation:
    """Add requests that fit at first but exceed the blocks as they grow."""
    sim = Simulation(**({"num_blocks": 8, "block_size": 4} | config))
    for i in range(requests):
        sim.add(f"r{i}", [i] * prompt, max_tokens=max_tokens)
    return sim


def until_preempted(sim: Simulation) -> None:
    while not sim.scheduler.stats().preemptions:
        sim.tick()


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_every_mode_gives_the_same_tokens(mode: str, caching: bool, depth: int) -> None:
    sim = add_growing_requests(preemption_mode=mode, enable_prefix_caching=caching, num_host_blocks=16)
    sim.drain(depth=depth)
    sim.verify()
    stats = sim.scheduler.stats()
    assert stats.preemptions == stats.preemptions_swap + stats.preemptions_recompute > 0
    assert (stats.preemptions_recompute > 0) == (mode == "recompute")


def test_the_latest_sequence_is_preempted() -> None:
    sim = add_growing_requests()
    until_preempted(sim)
    assert sim.scheduler.waiting_reason("r2")
    assert not sim.scheduler.waiting_reason("r0")


def test_the_lowest_priority_is_preempted() -> None:
    sim = Simulation(num_blocks=8, policy="priority")
    for name, priority in (("low", 5), ("high", 1), ("mid", 3)):
        sim.add(name, [priority] * 8, priority=priority, max_tokens=12)
    until_preempted(sim)
    assert sim.scheduler.waiting_reason("low")
    assert not sim.scheduler.waiting_reason("mid")
    sim.drain()
    sim.verify()


def test_a_swapped_sequence_resumes_without_recomputation() -> None:
    sim = add_growing_requests(num_host_blocks=16, preemption_mode="swap")
    sim.drain()
    sim.verify()
    stats = sim.scheduler.stats()
    assert stats.swapped_out_blocks >= stats.swapped_in_blocks > 0
    assert stats.recomputed_tokens == 0
    assert sim.executor.tokens_computed == 3 * (8 + 12 - 1)


def test_without_host_tier_all_evicted_blocks_are_recomputed() -> None:
    sim = add_growing_requests()
    sim.drain()
    sim.verify()
    stats = sim.scheduler.stats()
    assert stats.preemptions_recompute > 0
    assert sim.executor.tokens_computed == 3 * (8 + 12 - 1) + stats.recomputed_tokens
    assert stats.dropped_blocks > 0


@pytest.mark.parametrize(
    ("costs", "swaps"),
    [
        (StepCosts(prefill_token_s=1.0, swap_block_s=1.0), True),
        (StepCosts(prefill_token_s=1.0, swap_block_s=9.0), False),
        (StepCosts(prefill_token_s=0.0, swap_block_s=9.0), True),
        (StepCosts(prefill_token_s=1.0, swap_block_s=0.0), True),
    ],
    ids=["cheap", "dear", "unmeasured prefill", "unmeasured swap"],
)
def test_auto_decides_by_measured_costs(costs: StepCosts, swaps: bool) -> None:
    sim = add_growing_requests(num_host_blocks=16)
    sim.costs = costs
    until_preempted(sim)
    stats = sim.scheduler.stats()
    assert (stats.preemptions_swap > 0) == swaps
    assert (stats.preemptions_recompute > 0) != swaps
    sim.drain()
    sim.verify()


def test_recompute_saves_no_blocks() -> None:
    sim = add_growing_requests(num_host_blocks=16, preemption_mode="recompute", max_tokens=9)
    until_preempted(sim)
    for _ in range(3):
        sim.tick()
    assert sim.scheduler.stats().swapped_out_blocks == 0


def test_cached_blocks_move_to_the_host_and_back() -> None:
    sim = Simulation(num_blocks=4, num_host_blocks=8, block_size=4)
    for name, token in (("a", 1), ("b", 2), ("a2", 1)):
        sim.add(name, [token] * 12, max_tokens=1)
        sim.drain()
    sim.verify()
    stats = sim.scheduler.stats()
    assert stats.preemptions == 0
    assert stats.swapped_in_blocks > 0
    assert stats.prefix_cache_hits == 11
    assert sim.executor.tokens_computed == 12 + 12 + 1


def test_blocks_dropped_by_a_small_host_tier_are_recomputed() -> None:
    sim = add_growing_requests(requests=5, num_host_blocks=2, preemption_mode="swap")
    sim.drain()
    sim.verify()
    stats = sim.scheduler.stats()
    assert stats.preemptions_swap > 0
    assert stats.dropped_blocks > 0
    assert stats.recomputed_tokens > 0


def preempted_in_flight(*, drafts: list[int]) -> tuple[Simulation, Sequence]:
    """Run two sequences in alternating plans, two in flight, so that the second is preempted before its commit."""
    sim = Simulation(num_blocks=6, num_host_blocks=8, block_size=4, preemption_mode="swap")
    sim.add("old", [1] * 8, max_tokens=14)
    sim.step()
    sim.add("new", [2] * 5, max_tokens=14)
    sim.step()
    old, new = sim.live
    while not new.num_preemptions:
        sim.commit()
        if new.computed < len(new.token_ids):
            sim.scheduler.propose(new.seq_id, drafts)
        sim.step()
    assert old.status == "running"
    assert new.in_flight
    return sim, new


def test_rejected_drafts_in_a_swapped_tail_are_computed_again() -> None:
    """The number of valid tokens in the saved tail is known only after it was saved."""
    sim, new = preempted_in_flight(drafts=[99, 99])
    assert new.saved > len(new.token_ids)
    while sim.results:
        sim.commit()
    assert new.saved == len(new.token_ids) - 1
    sim.drain()
    sim.verify()


def test_a_preempted_sequence_waits_for_its_sampled_token() -> None:
    sim, new = preempted_in_flight(drafts=[])
    known = len(new.token_ids)
    sim.abort("old")
    assert sim.step().seqs == [], "there are enough blocks, but its newest token is not committed"
    while sim.results:
        sim.commit()
    assert len(new.token_ids) == known + 1
    assert sim.step().seqs
    sim.drain()
    sim.verify()


@pytest.mark.parametrize("block_size", [1, 4])
def test_siblings_are_preempted_together(block_size: int) -> None:
    """Each of them holds only shared blocks: one alone frees none, all together do."""
    sim = Simulation(num_blocks=12 // block_size, block_size=block_size, max_num_seqs=8)
    sim.add("old", [1] * 4, max_tokens=7)
    sim.tick()
    sim.add("group", [2] * 5, n=4, max_tokens=5)
    sim.drain()
    sim.verify()
    assert sim.scheduler.stats().preemptions > 0
