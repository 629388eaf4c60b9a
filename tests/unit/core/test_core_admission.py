"""Admission: order, time and number of tokens; and requests that are never admitted."""

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo_testing.simulation import Simulation, sim_config, sim_request


def shares(sim: Simulation) -> list[int]:
    return [step.num_tokens for step in sim.tick().seqs]


def test_chunks_and_decodes_share_one_budget() -> None:
    sim = Simulation(max_num_batched_tokens=8)
    sim.add("a", [1] * 6)
    sim.add("b", [2] * 15)
    assert shares(sim) == [6, 2]
    assert shares(sim) == [1, 7]
    assert shares(sim) == [1, 6]
    assert shares(sim) == [1, 1]
    sim.drain()
    sim.verify()


def test_the_threshold_leaves_budget_beside_a_long_prompt() -> None:
    sim = Simulation(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    sim.add("a", [1] * 20)
    sim.add("b", [2] * 4)
    assert shares(sim) == [3, 3]
    assert shares(sim) == [3, 1]


def test_an_unchunked_prompt_waits_for_enough_budget() -> None:
    sim = Simulation(max_num_batched_tokens=64, enable_chunked_prefill=False, num_blocks=40)
    sim.add("a", [1] * 40)
    sim.add("b", [2] * 30)
    assert shares(sim) == [40]
    assert sim.scheduler.waiting_reason("b") == "budget"
    assert shares(sim) == [1, 30]
    sim.drain()
    sim.verify()


def test_plans_in_flight_pipeline_chunks_but_not_decodes() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sim.add("a", [1] * 10)
    assert [sim.step().seqs[0].num_tokens for _ in range(3)] == [4, 4, 2]
    assert sim.step().is_empty, "its token is not committed yet"
    for _ in range(3):
        sim.commit()
    assert sim.step().seqs[0].start == 10
    sim.drain()
    sim.verify()


def test_admission_allocates_blocks_for_all_known_tokens() -> None:
    sim = Simulation(num_blocks=8, block_size=4, max_num_batched_tokens=4)
    sim.add("a", [1] * 20)
    sim.add("b", [2] * 16)
    sim.tick()
    assert sim.scheduler.stats().in_use_blocks == 5
    for _ in range(5):
        sim.tick()
    assert sim.scheduler.stats().waiting == 1
    assert sim.scheduler.waiting_reason("b") == "capacity"
    assert sim.scheduler.waiting_reason("a") is None
    sim.drain()
    sim.verify()


def test_the_watermark_keeps_blocks_for_running_sequences() -> None:
    sim = Simulation(num_blocks=10, watermark=0.3)
    sim.add("a", [1] * 20)
    sim.add("b", [2] * 12)
    sim.tick()
    assert sim.scheduler.waiting_reason("b") == "capacity"
    alone = Simulation(num_blocks=10, watermark=1.0)
    alone.add("a", [1] * 30)
    assert alone.tick().seqs, "while no sequence runs, no blocks are kept in reserve"


def test_no_request_overtakes_the_head_of_the_queue() -> None:
    sim = Simulation(num_blocks=8)
    sim.add("a", [1] * 20)
    sim.add("big", [2] * 16)
    sim.add("small", [3])
    sim.tick()
    assert sim.scheduler.stats().running == 1
    assert sim.scheduler.waiting_reason("small") == "capacity"
    sim.drain()
    sim.verify()


def test_lower_priority_values_run_first_and_ties_by_arrival() -> None:
    sim = Simulation(policy="priority", max_num_seqs=1)
    sim.add("late", [1], priority=1, arrival_s=2.0, max_tokens=1)
    sim.add("early", [2], priority=1, arrival_s=1.0, max_tokens=1)
    sim.add("urgent", [3], priority=0, arrival_s=3.0, max_tokens=1)
    order = [output.request_id for _ in range(3) for output in (sim.step(), sim.commit())[1]]
    assert order == ["urgent", "early", "late"]


def test_priority_is_ignored_without_the_policy() -> None:
    sim = Simulation(max_num_seqs=1)
    sim.add("first", [1], priority=9, arrival_s=1.0)
    sim.add("second", [2], priority=0, arrival_s=2.0)
    sim.tick()
    assert sim.scheduler.waiting_reason("second") == "max_num_seqs"


def test_a_request_is_admitted_when_all_outputs_have_a_place() -> None:
    sim = Simulation(max_num_seqs=4)
    sim.add("a", [1, 2])
    sim.add("b", [2, 3])
    sim.add("group", [3, 4], n=3)
    sim.tick()
    assert sim.scheduler.stats().running == 2
    assert sim.scheduler.waiting_reason("group") == "max_num_seqs"
    sim.abort("a")
    sim.tick()
    assert sim.scheduler.stats().running == 4
    sim.drain()
    sim.verify()


@pytest.mark.parametrize(
    ("config", "prompt", "params", "message"),
    [
        ({"max_model_len": 16}, [1] * 16, {}, "maximum context length is 16 tokens"),
        ({"num_blocks": 3}, [1] * 12, {}, "the KV cache holds 12"),
        ({"max_num_seqs": 2}, [1], {"n": 3}, "max_num_seqs=2"),
        ({}, [], {}, "empty"),
    ],
)
def test_a_request_that_can_never_run_is_refused(config: dict, prompt: list[int], params: dict, message: str) -> None:  # type: ignore[type-arg]
    scheduler = Scheduler(sim_config(**config))
    with pytest.raises(InvalidRequest, match=message) as caught:
        scheduler.add(sim_request("r", prompt, **params), 0.0)
    assert isinstance(caught.value, ContextLengthExceeded) == ("context length" in message)
    assert not scheduler.has_work()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    sim = Simulation()
    sim.add("r", [1])
    with pytest.raises(InvalidRequest, match="in use"):
        sim.add("r", [2])
    sim.drain()
    sim.add("r", [1])


@pytest.mark.parametrize(
    "config", [{"num_blocks": 0}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, {"max_num_seqs": 0}]
)
def test_an_unusable_configuration_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(StartupError):
        Scheduler(sim_config(**config))


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5])
def test_lengths_around_block_edges_finish(prompt: int, max_tokens: int) -> None:
    sim = Simulation(block_size=4)
    for name in ("cold", "warm"):
        sim.add(name, [7] * prompt, max_tokens=max_tokens, logprobs=1)
        sim.drain()
    sim.verify()


def test_the_longest_sequence_that_fits_runs_to_the_last_slot() -> None:
    sim = Simulation(num_blocks=4, block_size=4, max_model_len=64)
    sim.add("r", [1] * 15, max_tokens=40)
    sim.drain()
    sim.verify()
    assert len(sim.received["r", 0].token_ids) == 1


def test_stats_count_used_slots() -> None:
    sim = Simulation()
    sim.add("a", [1] * 6, n=2)
    sim.tick()
    stats = sim.scheduler.stats()
    assert (stats.in_use_blocks, stats.kv_used_slots, stats.batched_tokens) == (2, 6, 8)
    sim.tick()
    stats = sim.scheduler.stats()
    assert (stats.in_use_blocks, stats.kv_used_slots) == (3, 10)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (6, 4, 2)


def test_blocks_that_a_waiting_request_will_find_are_evicted_last() -> None:
    sim = Simulation(num_blocks=8, max_num_seqs=1)
    for name, first in (("older", 10), ("younger", 30)):
        sim.add(name, [*range(first, first + 8)], max_tokens=1)
        sim.drain()
    sim.add("grows", [1, 2, 3, 4], max_tokens=18)
    sim.tick()
    sim.add("waits", [*range(10, 18), 9], max_tokens=1)
    sim.drain()
    assert sim.received["waits", 0].last.num_cached_tokens == 8


@pytest.mark.parametrize("is_admitted", [False, True])
def test_host_blocks_that_a_waiting_request_will_find_are_dropped_last(is_admitted: bool) -> None:
    """The last block of a prefix is dropped before the first one, without which the others are of no use."""
    sim = Simulation(num_blocks=6, num_host_blocks=8, max_num_seqs=1)
    for name, first in (("older", 10), ("younger", 30)):
        sim.add(name, [*range(first, first + 8)], max_tokens=1)
        sim.drain()
    sim.add("large", [*range(40, 60)], max_tokens=1)  # takes the blocks of both
    sim.drain()
    host = sim.scheduler._state.kv.host
    assert host is not None
    before = [*host.cached_hashes()]
    sim.add("waits", [*range(10, 18), 9], max_tokens=1)
    if is_admitted:
        sim.step()
    prefix = sim.scheduler.sequences()[0].hashes[:2]
    after = [key for key in host.cached_hashes() if key in before]
    assert after == [key for key in before if key not in prefix] + prefix[::-1]
