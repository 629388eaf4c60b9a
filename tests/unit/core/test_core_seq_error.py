"""A sequence whose own result is an error (its logits are not finite) ends alone; the other sequences continue."""

from octavo_engine.core.replay import replay
from octavo_engine.core.trace import TracingScheduler
from octavo_engine.wire.records import ErrorInfo
from octavo_testing.simulation import Simulation, sim_config

ERROR = ErrorInfo("no token left", "invalid_request")


def test_only_the_failed_sequence_ends_and_the_trace_replays() -> None:
    lines: list[str] = []
    sim = Simulation(scheduler=TracingScheduler(sim_config(), lines.append))
    sim.add("good", [1] * 4)
    sim.add("bad", [2] * 4)
    plan = sim.step()
    bad = plan.seqs[1].seq_id
    for result in sim.results[0].seqs:
        if result.seq_id == bad:
            result.token_ids, result.error = [], ERROR
    outputs = sim.commit()
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("good", None, None),
        ("bad", "error", ERROR),
    ]
    assert outputs[1].timing is not None
    sim.drain()
    sim.verify()
    assert replay(lines).ok


def test_blocks_of_a_failed_sequence_are_not_found_again() -> None:
    """Values that are not finite would spread to every request with the same prompt."""
    sim = Simulation(block_size=4)
    sim.add("good", [1] * 5, max_tokens=8)
    sim.tick()
    sim.add("bad", [1] * 4 + [2] * 8)
    sim.step()
    _, result = sim.results[0].seqs
    result.token_ids, result.error = [], ERROR
    sim.commit()
    sim.add("again", [1] * 4 + [2] * 8)
    assert sim.step().seqs[1].start == 4, "blocks of other sequences stay cached"
    sim.drain()
    sim.verify()
