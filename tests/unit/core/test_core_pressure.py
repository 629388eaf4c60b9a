"""KV blocks for a third of the load: all requests finish with the same tokens as without pressure."""

import random

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.plan import StepCosts
from octavo_testing.simulation import Simulation

NUM_REQUESTS = 200
MAX_RUNNING = 32


def load(**config: object) -> Simulation:
    sim = Simulation(
        block_size=4,
        max_model_len=200,
        max_num_seqs=MAX_RUNNING,
        max_num_batched_tokens=128,
        debug_invariants=False,
        costs=StepCosts(prefill_token_s=1.0, swap_block_s=2.5),
        **config,
    )
    rng = random.Random(7)
    shared = [rng.randrange(50) for _ in range(24)]
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(50) for _ in range(rng.randint(1, 60))]
        prompt = shared[: rng.choice([0, 10, 24])] + own
        n, max_tokens, priority = rng.choice([1, 1, 1, 2, 3]), rng.randint(1, 50), rng.randint(0, 2)
        sim.add(f"r{i}", prompt, max_tokens=max_tokens, n=n, priority=priority, logprobs=1)
    return sim


@pytest.fixture(scope="module")
def peak_blocks() -> int:
    """Return the most blocks that the load uses at once when there are enough."""
    sim, peak = load(num_blocks=4000), 0
    while sim.scheduler.has_work():
        sim.tick()
        peak = max(peak, sim.scheduler.stats().in_use_blocks)
    sim.verify()
    assert sim.scheduler.stats().preemptions == 0
    return peak


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_third_of_the_blocks_gives_the_same_tokens(peak_blocks: int, mode: str, policy: str, depth: int) -> None:
    blocks = peak_blocks // 3
    sim = load(num_blocks=blocks, num_host_blocks=blocks // 2, preemption_mode=mode, policy=policy)
    sim.drain(depth=depth)
    sim.verify()
    assert all(r.last and r.last.finish_reason == "length" for r in sim.received.values())
    stats = sim.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.dropped_blocks > 0
    assert stats.recomputed_tokens > 0
    assert stats.swapped_out_blocks > 0
    assert stats.swapped_in_blocks > 0
    assert (stats.preemptions_swap > 0) == (mode != "recompute")
    assert (stats.preemptions_recompute > 0) == (mode != "swap")
    assert sim.executor.tokens_computed >= stats.recomputed_tokens + stats.generation_tokens - len(sim.received)


def test_at_most_4_percent_of_used_slots_are_empty() -> None:
    """Lengths range from 10 to 2000; over the whole run less than 4 % of the slots of blocks in use are empty."""
    sim = Simulation(
        block_size=16,
        num_blocks=6000,
        max_model_len=2100,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        debug_invariants=False,
    )
    rng = random.Random(3)
    for i in range(40):
        length = round(10 * 200 ** rng.random())
        sim.add(f"r{i}", [rng.randrange(50) for _ in range(length)], max_tokens=16)
    used = slots = 0
    while sim.scheduler.has_work():
        sim.tick()
        stats = sim.scheduler.stats()
        used += stats.kv_used_slots
        slots += stats.in_use_blocks * 16
    assert used / slots > 0.96


def test_the_default_watermark_saves_prefill_that_preemption_would_lose() -> None:
    """Without a watermark, the next decode step preempts the request that was admitted into the last free blocks."""
    lost = {}
    for watermark in (0.0, EngineConfig().watermark):
        sim = Simulation(
            num_blocks=400,
            block_size=16,
            max_model_len=512,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            debug_invariants=False,
            watermark=watermark,
        )
        rng = random.Random(1)
        for i in range(100):
            prompt = [rng.randrange(2, 9999) for _ in range(rng.randrange(40, 160))]
            sim.add(f"r{i}", prompt, max_tokens=rng.randrange(50, 200))
        sim.drain()
        lost[watermark] = sim.scheduler.stats().recomputed_tokens
    assert 0.75 * lost[0.0] > lost[EngineConfig().watermark]
