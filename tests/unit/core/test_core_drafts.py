"""Drafts take neither tokens of a step nor blocks from other sequences, and end where their sequence ends."""

import pytest
from octavo_engine.wire.records import EngineStats
from octavo_testing.simulation import Simulation


def running(sim: Simulation, *names: str, **fields: int) -> None:
    for i, name in enumerate(names):
        sim.add(name, [1 + i] * 4, max_tokens=8, **fields)
    sim.tick()


def num_drafts(sim: Simulation) -> list[int]:
    for seq in sim.live:
        sim.scheduler.propose(seq.seq_id, [99] * 5)
    return [len(step.draft_token_ids) for step in sim.tick().seqs]


def test_each_sequence_decodes_before_others_get_drafts() -> None:
    sim = Simulation(max_num_batched_tokens=12)
    running(sim, "a", "b", "c")
    assert num_drafts(sim) == [5, 4, 0]
    sim.drain()
    sim.verify()


@pytest.mark.parametrize(("num_blocks", "expected"), [(3, [3, 3]), (4, [5, 3]), (6, [5, 5])])
def test_drafts_preempt_no_sequence(num_blocks: int, expected: list[int]) -> None:
    sim = Simulation(num_blocks=num_blocks + 1, block_size=8, max_model_len=16)
    running(sim, "a", "b")
    sim.tick()
    before = sim.scheduler.stats().preemptions
    num_drafts(sim)
    assert sim.scheduler.stats().preemptions == before == 0


def test_only_sequences_that_decode_are_offered_for_drafts() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sim.add("short", [1] * 3, max_tokens=4)
    sim.tick()
    sim.add("long", [2] * 9, max_tokens=4)
    sim.tick()
    assert [seq.request_id for seq in sim.scheduler.decoding()] == ["short"]


def test_accepted_drafts_are_counted_by_position() -> None:
    sim = Simulation()
    sim.add("r", [1] * 5, max_tokens=20)
    sim.tick()
    tokens, _, _ = sim.expected("r")
    (seq,) = sim.live
    for drafts in ([tokens[1], tokens[2], 99], [99], [tokens[5], 99, 99, 99]):
        sim.scheduler.propose(seq.seq_id, drafts)
        sim.tick()
    stats: EngineStats = sim.scheduler.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_draft_tokens) == (3, 8, [2, 1, 0, 0])
    sim.drain()
    sim.verify()


def test_an_end_token_inside_accepted_drafts_ends_the_output() -> None:
    plain = Simulation()
    plain.add("r", [1] * 5, max_tokens=8)
    plain.drain()
    tokens, _, _ = plain.expected("r")
    stop = tokens[2]
    sim = Simulation()
    sim.add("r", [1] * 5, max_tokens=8, stop_token_ids=[stop])
    sim.tick()
    (seq,) = sim.live
    sim.scheduler.propose(seq.seq_id, tokens[1:5])
    sim.tick()
    assert not sim.live
    assert sim.received["r", 0].token_ids == tokens[: tokens.index(stop) + 1]
