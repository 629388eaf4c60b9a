"""Copy-on-write: outputs that share a prompt, forks at any step, and prompts that are cached to the last token."""

import pytest
from octavo_engine.wire.plan import StepPlan
from octavo_testing.simulation import Simulation


def first_step(sim: Simulation) -> StepPlan:
    plan = sim.step()
    sim.commit()
    return plan


def test_the_prompt_is_computed_once_and_its_partial_block_is_shared() -> None:
    sim = Simulation(block_size=4)
    sim.add("r", [1] * 6, n=4)
    plan = first_step(sim)
    parent, *children = plan.seqs
    assert (parent.num_tokens, plan.num_tokens) == (6, 6)
    assert [(c.num_tokens, c.start, c.sample, c.logits_from) for c in children] == [(0, 6, True, parent.seq_id)] * 3
    assert [c.block_ids for c in children] == [parent.block_ids] * 3
    base = plan.new_seqs[0].seed
    assert [new.seed for new in plan.new_seqs] == [base, base + 1, base + 2, base + 3]
    assert sim.scheduler.stats().in_use_blocks == 2
    plan = first_step(sim)
    assert len(plan.copies) == 3, "the last holder writes in place"
    assert len({src for src, _ in plan.copies}) == 1
    assert all(step.table_start == 1 for step in plan.seqs if step.block_ids)
    sim.drain()
    sim.verify()
    assert sim.scheduler.stats().cow_copies == 3


def test_a_prompt_that_ends_on_a_block_edge_is_not_copied() -> None:
    sim = Simulation(block_size=4)
    sim.add("r", [1] * 8, n=3)
    sim.drain()
    sim.verify()
    assert sim.scheduler.stats().cow_copies == 0


def test_a_fully_cached_prompt_recomputes_one_token() -> None:
    sim = Simulation(block_size=4)
    sim.add("cold", [1] * 8, max_tokens=1)
    sim.drain()
    sim.add("warm", [1] * 8, max_tokens=1)
    plan = first_step(sim)
    assert (plan.num_tokens, plan.seqs[0].start, len(plan.copies)) == (1, 7, 1)
    sim.verify()
    last = sim.received["warm", 0].last
    assert last is not None
    assert last.num_cached_tokens == 7
    stats = sim.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16, 7)


def test_two_equal_prompts_in_one_step_share_all_blocks_but_the_last() -> None:
    """The last block is written in the same step, and copies run before, so it cannot be copied yet."""
    sim = Simulation(block_size=4)
    sim.add("a", [1] * 8)
    sim.add("b", [1] * 8)
    plan = first_step(sim)
    assert [(s.start, s.num_tokens) for s in plan.seqs] == [(0, 8), (4, 4)]
    assert not plan.copies
    sim.drain()
    sim.verify()


def test_the_source_of_a_copy_is_not_reused_in_its_step() -> None:
    """Once its only user has a copy, the cached block can be evicted; but copies run after swapping in."""
    sim = Simulation(num_blocks=4, num_host_blocks=4, block_size=4)
    for name, prompt in (("on host", [2] * 4), ("fill", [9] * 15), ("on device", [1] * 4)):
        sim.add(name, prompt, max_tokens=1)
        sim.drain()
    sim.add("copies", [1] * 4, max_tokens=1)
    sim.add("swaps in", [2] * 12, max_tokens=1)
    plan = first_step(sim)
    assert (len(plan.copies), plan.swap_in) == (1, [])
    assert sim.scheduler.waiting_reason("swaps in") == "capacity"
    assert first_step(sim).swap_in
    sim.drain()
    sim.verify()


@pytest.mark.parametrize("ticks", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_fork_at_any_step_gives_the_right_tokens(ticks: int, in_flight: bool) -> None:
    sim = Simulation(block_size=4)
    sim.add("r", [1] * 6, max_tokens=10)
    for _ in range(ticks):
        sim.tick()
    if in_flight:
        sim.step()
    request_id, index = sim.fork(sim.live[0])
    sim.fork(sim.live[1])
    assert index == 1
    before = sim.executor.tokens_computed
    sim.drain()
    sim.verify()
    assert sim.executor.tokens_computed - before <= 3 * 10, "a fork recomputes one token at most"
    assert len(sim.received[request_id, 0].token_ids) == 10


def test_a_fork_of_a_waiting_sequence_waits() -> None:
    sim = Simulation(max_num_seqs=1)
    sim.add("r", [1] * 6)
    sim.fork(sim.live[0])
    sim.tick()
    sim.fork(sim.live[0])
    assert sim.scheduler.stats().waiting == 2
    sim.drain()
    sim.verify()


def test_a_request_cannot_fork_before_its_own_outputs_fork() -> None:
    sim = Simulation()
    sim.add("r", [1], n=2)
    with pytest.raises(ValueError, match="outputs"):
        sim.fork(sim.live[0])


def test_a_fork_in_the_middle_of_a_prompt_computes_the_rest_itself() -> None:
    sim = Simulation(max_num_batched_tokens=5, block_size=4)
    sim.add("r", [1, 2, 3, 4] * 3)
    sim.tick()
    sim.fork(sim.live[0])
    sim.drain()
    sim.verify()


def test_rejected_drafts_leave_no_trace() -> None:
    sim = Simulation(block_size=4)
    sim.add("r", [1] * 5, max_tokens=12)
    sim.tick()
    tokens, _, _ = sim.expected("r")
    (seq,) = sim.live
    sim.scheduler.propose(seq.seq_id, [tokens[1], tokens[2], 99, 99])
    plan = sim.tick()
    assert plan.num_tokens == 5
    assert sim.received["r", 0].token_ids == tokens[:4]
    assert (seq.computed, len(seq.table), seq.num_registered) == (8, 3, 2), "the extra block is kept, without a hash"
    sim.scheduler.propose(seq.seq_id, [99])
    sim.drain()
    sim.verify()


def test_drafts_are_cut_to_budget_and_length() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sim.add("r", [1] * 4, max_tokens=4)
    sim.tick()
    (seq,) = sim.live
    sim.scheduler.propose(seq.seq_id, [9] * 20)
    (step,) = sim.step().seqs
    assert len(step.draft_token_ids) == 2, "three more tokens may come: two drafts and the one after"
    sim.scheduler.propose(seq.seq_id, [9])  # in flight: ignored
    assert seq.drafts == []
    sim.drain()
    sim.verify()


def test_outputs_report_the_cached_length_of_the_first_admission() -> None:
    sim = Simulation(num_blocks=6, block_size=4)
    sim.add("cold", [1] * 8, max_tokens=1)
    sim.drain()
    sim.add("a", [2] * 8, max_tokens=8)
    sim.add("b", [1] * 8, max_tokens=8)
    sim.drain()
    sim.verify()
    last = sim.received["b", 0].last
    assert last is not None
    assert last.num_preemptions > 0
    assert last.num_cached_tokens == 7


def test_requests_with_different_salts_share_no_blocks() -> None:
    sim = Simulation(block_size=4)
    for salt in ("", "one", "two"):
        sim.add(f"r{salt}", [1] * 8, salt=salt)
        sim.drain()
    assert sim.scheduler.stats().prefix_cache_hits == 0


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it() -> None:
    sim = Simulation(block_size=4, max_num_batched_tokens=5)
    sim.add("a", [1] * 12, prompt_logprobs=1)
    sim.drain()
    sim.add("b", [1] * 12, prompt_logprobs=1, n=2)
    assert sim.step().seqs[0].num_prompt_logprobs == 5
    sim.commit()
    sim.drain()
    assert sim.scheduler.stats().prefix_cache_hits == 0
    sim.add("c", [1] * 12)
    sim.drain()
    sim.verify()
    assert sim.scheduler.stats().prefix_cache_hits == 11
    collected = sim.received["b", 0].prompt_logprobs
    assert collected is not None
    assert len(collected) == 12
    assert sim.received["b", 1].prompt_logprobs is None


def test_a_disabled_cache_is_never_read() -> None:
    sim = Simulation(enable_prefix_caching=False, num_host_blocks=8)
    for name in ("a", "b"):
        sim.add(name, [1] * 12)
        sim.drain()
    stats = sim.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.cached_blocks) == (0, 0, 0)


def test_resetting_the_cache_is_refused_while_blocks_are_in_use() -> None:
    sim = Simulation(num_host_blocks=4)
    sim.add("a", [1] * 12)
    sim.tick()
    assert not sim.scheduler.reset_prefix_cache()
    sim.drain()
    assert sim.scheduler.cached_hashes()
    assert sim.scheduler.reset_prefix_cache()
    assert not sim.scheduler.cached_hashes()
    assert sim.scheduler.stats().cached_blocks == 0


def test_a_reset_drops_the_saved_blocks_of_swapped_sequences() -> None:
    sim = Simulation(num_blocks=8, num_host_blocks=8, preemption_mode="swap")
    sim.add("old", [1] * 12, max_tokens=12)
    sim.add("swapped", [2] * 10, max_tokens=12)
    while not sim.scheduler.stats().preemptions_swap:
        sim.tick()
    sim.abort("old")
    assert sim.live[0].private_blocks
    assert sim.scheduler.reset_prefix_cache()
    assert sim.scheduler._state.kv.host is not None
    assert not [*sim.scheduler._state.kv.host.private_keys()]
    sim.drain()
    sim.verify()
    assert sim.scheduler.stats().recomputed_tokens == 14
