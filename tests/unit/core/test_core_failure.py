"""A failed step ends only its own sequences, and no block that it may have corrupted is used again."""

import pytest
from octavo_engine.wire.plan import StepResult
from octavo_engine.wire.records import ErrorInfo, SeqOutput
from octavo_testing.simulation import Simulation


def test_the_sequences_of_the_step_end_with_the_error() -> None:
    sim = Simulation(max_num_batched_tokens=8, num_host_blocks=4)
    sim.add("a", [1] * 4, n=2)
    sim.add("b", [2] * 4)
    sim.add("later", [3] * 20)
    sim.step()
    outputs = sim.commit(error="out of memory")
    assert [(o.request_id, o.index, o.finish_reason, o.error) for o in outputs] == [
        ("a", 0, "error", ErrorInfo("out of memory", "internal")),
        ("a", 1, "error", ErrorInfo("out of memory", "internal")),
        ("b", 0, "error", ErrorInfo("out of memory", "internal")),
    ]
    assert sim.scheduler.stats().in_use_blocks == 0
    assert not sim.scheduler.cached_hashes()
    sim.drain()
    sim.verify()


def test_an_unforked_request_fails_for_each_output() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sim.add("a", [1] * 8, n=3)
    sim.step()
    assert [o.index for o in sim.commit(error="x")] == [0, 1, 2]
    assert not sim.scheduler.has_work()


def test_other_sequences_start_over_and_get_the_same_tokens() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sim.add("first", [1] * 3, max_tokens=9)
    sim.step()
    sim.add("second", [2] * 3, max_tokens=9, prompt_logprobs=1)
    sim.step()
    sim.commit()
    assert {o.request_id for o in sim.commit(error="x")} == {"second"}
    sim.add("third", [1] * 8)
    sim.drain()
    sim.verify()
    assert sim.received["first", 0].last is not None
    assert sim.received["first", 0].last.finish_reason == "length"
    assert sim.received["first", 0].last.num_preemptions == 1


def test_plans_in_flight_behind_the_failed_plan_are_discarded() -> None:
    sim = Simulation(max_num_batched_tokens=4)
    sim.add("a", [1] * 4)
    sim.step()
    sim.add("b", [2] * 4)
    sim.step()
    sim.commit(error="x")
    assert sim.commit() == []
    sim.drain()
    sim.verify()
    last = sim.received["b", 0].last
    assert last is not None
    assert last.finish_reason == "length"


def test_the_next_plan_drops_sequences_of_the_failed_plan_again() -> None:
    """The step may have failed before it dropped them."""
    sim = Simulation()
    sim.add("a", [1] * 4, max_tokens=1)
    gone = sim.step().seqs[0].seq_id
    sim.commit()
    sim.add("b", [2] * 4)
    assert sim.step().dropped_seqs == [gone]
    sim.commit(error="x")
    sim.add("c", [3] * 4)
    assert gone in sim.step().dropped_seqs


def test_an_unknown_step_is_ignored() -> None:
    assert Simulation().scheduler.commit(StepResult(step_id=77), 1.0) == []


@pytest.mark.parametrize("num_steps", [1, 2, 3], ids=["in the first part", "in the middle", "in the last part"])
def test_a_sequence_may_fail_before_its_prompt_ends(num_steps: int) -> None:
    sim = Simulation(max_num_batched_tokens=8)
    sim.add("a", [1] * 8, max_tokens=6)
    sim.step()
    sim.commit()
    sim.add("b", [2] * 20, max_tokens=2, prompt_logprobs=1)
    error, failed = ErrorInfo("no such row"), list[SeqOutput]()
    for number in range(num_steps):
        sim.step()
        if number == num_steps - 1:
            (seq,) = [each for each in sim.results[0].seqs if each.prompt_logprobs]
            seq.token_ids, seq.error = [], error
        failed += [o for o in sim.commit() if o.request_id == "b"]
    assert [(o.finish_reason, o.error) for o in failed] == [("error", error)]
    sim.drain()
    last = sim.received["a", 0].last
    assert last is not None
    assert last.finish_reason == "length"
    assert sim.scheduler.stats().in_use_blocks == 0
