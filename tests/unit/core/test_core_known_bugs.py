"""Bugs that users of other engines have reported (research, engine §4.5), with one test for each."""

import subprocess
import sys

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.wire.errors import InvalidRequest
from octavo_testing.simulation import Simulation, sim_config, sim_request


def test_vllm_18115_preempted_long_prompt_is_not_readmitted_by_one_chunk() -> None:
    """In vLLM it was readmitted as soon as one chunk fitted and preempted again, endlessly."""
    sim = Simulation(num_blocks=12, block_size=4, max_num_batched_tokens=6, max_model_len=48)
    sim.add("old", [1] * 4, max_tokens=30)
    sim.tick()
    sim.add("long", [2] * 36, max_tokens=3)
    long = next(seq for seq in sim.live if seq.request_id == "long")
    while sim.scheduler.has_work():
        before = sim.scheduler.stats()
        was_running = long.status == "running"
        sim.tick()
        if long.status == "running" and not was_running:
            needed = -(-len(long.token_ids) // 4)
            assert before.free_blocks + before.cached_blocks + 12 * (before.running == 0) >= needed
    sim.verify()
    assert long.num_preemptions == 1


def test_vllm_39734_oversized_request_is_refused_and_blocks_none() -> None:
    sim = Simulation(num_blocks=4, block_size=4, max_model_len=1000)
    with pytest.raises(InvalidRequest, match="holds 16"):
        sim.add("big", [1] * 16)
    sim.add("grows", [1] * 15, max_tokens=500)
    sim.add("behind", [2] * 4)
    sim.drain()
    sim.verify()


@pytest.mark.parametrize("prompt", [4, 15, 31])
def test_vllm_45387_head_of_the_queue_is_admitted_when_idle(prompt: int) -> None:
    """In vLLM: running 0, waiting N, cache 0 %. Watermark, spare tails or a full cache must not block the head."""
    sim = Simulation(num_blocks=8, block_size=4, watermark=1.0, max_num_batched_tokens=1, num_host_blocks=1)
    sim.add("warm", [prompt] * prompt, max_tokens=1)
    sim.drain()
    for i in range(3):
        sim.add(f"r{i}", [prompt] * prompt, max_tokens=1, n=4)
    assert sim.tick().num_tokens == 1
    sim.drain()
    sim.verify()


def test_vllm_metal_479_no_request_waits_for_an_empty_cache() -> None:
    """Accounting must not drift: after many requests all blocks are free and the next request is admitted."""
    sim = Simulation(num_blocks=8, block_size=4, num_host_blocks=3, max_num_batched_tokens=9)
    for i in range(60):
        sim.add(f"r{i}", [i % 3] * (1 + i % 20), max_tokens=1 + i % 9, n=1 + i % 3)
        sim.tick()
        if i % 4 == 0:
            sim.abort(f"r{i // 2}", None if i % 8 else 0)
    sim.drain()
    sim.verify()
    sim.add("last", [9] * 31)
    assert sim.tick().seqs
    assert sim.scheduler.waiting_reason("last") is None


def test_vllm_ascend_16315_preemption_always_frees_blocks() -> None:
    """Preempting a sequence whose blocks all stay in use frees nothing; repeating it empties the batch."""
    sim = Simulation(num_blocks=6, block_size=4)
    sim.add("old", [1] * 12, max_tokens=20)
    sim.add("pair", [2] * 8, max_tokens=20)
    sim.tick()
    old, pair = sim.live
    sim.fork(pair)
    for _ in range(4):  # `old` has the last block; the pair shares its two blocks: neither can continue or free one
        assert [step.seq_id for step in sim.tick().seqs] == [old.seq_id]
        assert sim.scheduler.stats().preemptions == 0
    sim.tick()
    assert sim.scheduler.stats().preemptions == 2, "both together free blocks"
    sim.drain()
    sim.verify()


def test_vllm_ascend_16315_sharer_of_all_blocks_is_not_preempted() -> None:
    sim = Simulation(num_blocks=3, block_size=4)
    sim.add("r", [1] * 6, n=2, max_tokens=6)
    for _ in range(3):
        sim.tick()
    first, second = sim.live
    sim.fork(first)
    third = sim.live[-1]
    sim.tick()
    assert (first.num_preemptions, second.num_preemptions, third.num_preemptions) == (0, 1, 0)
    sim.drain()
    sim.verify()


def test_vllm_37164_hit_block_is_not_evicted_for_the_same_request() -> None:
    """The hit blocks are the least recently used: looked up but not pinned, they would be evicted first."""
    sim = Simulation(num_blocks=6, block_size=4)
    sim.add("hit", [1] * 8, max_tokens=1)
    sim.drain()
    sim.add("other", [2] * 16, max_tokens=1)
    sim.drain()
    sim.add("again", [1] * 8 + [3] * 15, max_tokens=1)
    plan = sim.tick()
    (table,) = plan.seqs[0].block_ids
    assert len(set(table)) == len(table) == 6
    assert plan.seqs[0].start == 8
    sim.drain()
    sim.verify()


def test_vllm_18411_failed_admission_leaks_no_blocks() -> None:
    """The head of the queue is looked up in each step and does not fit: the pinned blocks are released."""
    sim = Simulation(num_blocks=8, block_size=4, num_host_blocks=4)
    sim.add("warm", [1] * 12, max_tokens=1)
    sim.drain()
    sim.add("runs", [2] * 17, max_tokens=12)
    sim.tick()
    sim.add("waits", [1] * 12 + [3] * 8, max_tokens=2)
    for _ in range(3):
        sim.tick()
        stats = sim.scheduler.stats()
        assert stats.waiting == 1
        assert stats.in_use_blocks == len(sim.live[0].table)
    sim.drain()
    sim.verify()
    last = sim.received["waits", 0].last
    assert last is not None
    assert last.num_cached_tokens > 0


@pytest.mark.parametrize("caching", [True, False])
def test_vllm_5543_cached_requests_get_the_same_tokens(caching: bool) -> None:
    """The scheduler's part: a hit maps the right blocks to the right positions, and seeds stay the same."""
    sim = Simulation(enable_prefix_caching=caching)
    for i, prompt in enumerate(([1] * 16, [1] * 16, [1] * 15, [1] * 17, [1] * 9 + [2] * 7)):
        sim.add(f"r{i}", prompt, seed=5, max_tokens=6)
        sim.drain()
    sim.verify()
    assert sim.received["r0", 0].token_ids == sim.received["r1", 0].token_ids


@pytest.mark.parametrize("host", [1, 2, 3, 16])
def test_vllm_546_swapping_does_not_stop_the_engine(host: int) -> None:
    """Swapped sequences are aborted, and host memory is smaller than the swapped blocks."""
    sim = Simulation(num_blocks=8, block_size=4, num_host_blocks=host, preemption_mode="swap")
    for i in range(12):
        sim.add(f"r{i}", [i] * 8, max_tokens=12)
    for i in range(30):
        sim.tick()
        if i % 5 == 0:
            swapped = [seq for seq in sim.live if seq.status == "preempted"]
            for seq in swapped[:1]:
                sim.abort(seq.request_id)
    sim.drain()
    sim.verify()
    assert sim.scheduler.stats().preemptions_swap > 0


def test_lmcache_1969_preempted_request_finds_its_own_blocks() -> None:
    sim = Simulation(num_blocks=8, block_size=4)
    sim.add("old", [1] * 8, max_tokens=6)
    sim.add("new", [2] * 15, max_tokens=9)
    while not sim.scheduler.stats().preemptions:
        sim.tick()
    new = next(seq for seq in sim.live if seq.request_id == "new")
    assert new.saved >= 16
    sim.abort("old")
    step = next(s for s in sim.tick().seqs if s.seq_id == new.seq_id)
    assert step.start == 16
    sim.drain()
    sim.verify()


def test_lmcache_2327_resumed_request_computes_at_least_one_token() -> None:
    """Another request has cached all its blocks, including its last sampled token, meanwhile."""
    sim = Simulation(num_blocks=16, block_size=4, max_num_seqs=1, policy="priority")
    sim.add("r", [1] * 8, max_tokens=9)
    for _ in range(4):
        sim.tick()
    (seq,) = sim.live
    assert len(seq.token_ids) == 12
    sim.scheduler._state.preempt(seq, swap=False)
    sim.add("twin", list(seq.token_ids), max_tokens=1, priority=-1)
    sim.tick()
    (step,) = sim.tick().seqs
    assert (step.seq_id, step.start, step.num_tokens) == (seq.seq_id, 11, 1)
    sim.drain()
    sim.verify()


def test_vllm_25210_hashes_are_equal_in_every_process() -> None:
    code = (
        "from octavo_engine.core.scheduler import Scheduler; from octavo_testing.simulation import *\n"
        "s = Scheduler(sim_config(), kv_events=True); s.add(sim_request('r', [1] * 12), 0.0); s.step(1.0)\n"
        "print([h.hex() for _, h in s.take_kv_delta().stored])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    scheduler = Scheduler(sim_config(), kv_events=True)
    scheduler.add(sim_request("r", [1] * 12), 0.0)
    scheduler.step(1.0)
    here = [block_hash.hex() for _, block_hash in scheduler.take_kv_delta().stored]
    assert len(here) == 3
    assert runs == [f"{here}\n"] * 2


@pytest.mark.parametrize("num_blocks", [5, 6, 7, 9])
@pytest.mark.parametrize("host", [0, 2])
def test_vllm_15996_a_nearly_full_cache_never_gives_empty_schedules(num_blocks: int, host: int) -> None:
    sim = Simulation(num_blocks=num_blocks, num_host_blocks=host, block_size=4, max_model_len=20, max_num_seqs=6)
    for i in range(10):
        sim.add(f"r{i}", [i] * 9, max_tokens=11)
    while sim.scheduler.has_work():
        assert sim.tick().num_tokens > 0
    sim.verify()
