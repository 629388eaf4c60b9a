"""Aborts in every state: the blocks are freed at once, and each output gets exactly one terminal record."""

from collections.abc import Callable

import pytest
from octavo_testing.simulation import Simulation

Setup = Callable[[Simulation], None]


def waiting(sim: Simulation) -> None:
    sim.add("r", [1] * 10)


def mid_chunk(sim: Simulation) -> None:
    sim.add("r", [1] * 20)
    sim.tick()


def running(sim: Simulation) -> None:
    sim.add("r", [1] * 6)
    sim.tick()


def in_flight(sim: Simulation) -> None:
    running(sim)
    sim.step()


def pipelined_chunks(sim: Simulation) -> None:
    sim.add("r", [1] * 30)
    sim.step()
    sim.step()


def preempt_request(sim: Simulation) -> None:
    """Preempt "r": an older request grows until blocks run out."""
    sim.add("old", [2] * 18, max_tokens=22)
    sim.add("r", [1] * 10, max_tokens=20)
    while not sim.scheduler.stats().preemptions:
        sim.tick()


def preempt_in_flight(sim: Simulation) -> None:
    """Preempt a sequence while its plan is in flight: two plans, each with one sequence, alternate."""
    sim.add("old", [2] * 18, max_tokens=22)
    while not sim.step().seqs[0].sample:
        sim.commit()
    sim.add("r", [1] * 10, max_tokens=20)
    sim.step()
    while not sim.scheduler.stats().preemptions:
        sim.commit()
        sim.step()
    assert sim.live[1].in_flight


def forked_siblings(sim: Simulation) -> None:
    sim.add("r", [1] * 6, n=3)
    sim.tick()


def unborn_siblings(sim: Simulation) -> None:
    sim.add("r", [1] * 20, n=3)
    sim.tick()


STATES = [
    waiting, mid_chunk, running, in_flight, pipelined_chunks, preempt_request, preempt_in_flight, forked_siblings,
    unborn_siblings,
]  # fmt: skip


@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("host", [0, 2, 16])
def test_an_abort_in_every_state_frees_all_blocks(reach: Setup, host: int) -> None:
    sim = Simulation(num_blocks=10, num_host_blocks=host, max_num_batched_tokens=12, preemption_mode="swap")
    reach(sim)
    held = {block for seq in sim.live if seq.request_id != "r" for block in seq.table}
    sim.abort("r")
    assert sim.scheduler.stats().in_use_blocks == len(held)
    assert all(r.last and r.last.finish_reason == "abort" for (name, _), r in sim.received.items() if name == "r")
    sim.abort("r")
    sim.drain()
    sim.verify()


@pytest.mark.parametrize("reach", [forked_siblings, unborn_siblings])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_aborted_output_leaves_its_siblings_running(reach: Setup, index: int) -> None:
    sim = Simulation(num_blocks=10, max_num_batched_tokens=12)
    reach(sim)
    sim.abort("r", index)
    sim.abort("r", index)
    assert [i for i in range(3) if sim.received["r", i].last] == [index]
    sim.drain()
    sim.verify()
    reasons = {i: sim.received["r", i].last.finish_reason for i in range(3)}  # type: ignore[union-attr]
    assert reasons == {i: "abort" if i == index else "length" for i in range(3)}


def test_aborting_all_outputs_one_by_one_ends_the_request() -> None:
    sim = Simulation(num_blocks=10, max_num_batched_tokens=12)
    unborn_siblings(sim)
    for index in (1, 0, 2):
        assert sim.scheduler.has_work()
        sim.abort("r", index)
    assert not sim.scheduler.has_work()
    sim.verify()


def test_the_runner_drops_an_aborted_sequence() -> None:
    sim = Simulation()
    running(sim)
    seq_id = sim.live[0].seq_id
    sim.abort("r")
    sim.add("next", [2])
    assert sim.step().dropped_seqs == [seq_id]
    sim.commit()
    assert seq_id not in sim.executor.seqs


def test_an_unknown_request_is_ignored() -> None:
    sim = Simulation()
    assert sim.scheduler.abort("nobody") == []
    assert sim.scheduler.waiting_reason("nobody") is None


def test_an_abort_while_waiting_reports_the_queue_time() -> None:
    sim = Simulation()
    waiting(sim)
    sim.scheduler._state.now = 5.0
    (output,) = sim.scheduler.abort("r")
    assert output.timing is not None
    assert (output.timing.queue_s, output.timing.inference_s) == (5.0, 0.0)
