"""Decode steps that are planned before the newest tokens are known."""

import pytest
from octavo_testing.simulation import Simulation


def simulate(*, depth: int = 2, requests: int = 6, steps_ahead: int = 1, **fields: object) -> Simulation:
    """Run requests with `depth` plans in flight and ample blocks."""
    config = {"num_blocks": 200, "max_model_len": 64, "max_num_batched_tokens": 64, "steps_ahead": steps_ahead}
    sim = Simulation(**config)  # type: ignore[arg-type]
    for i in range(requests):
        sim.add(f"r{i}", [i] * (3 + i), **fields)
    sim.drain(depth=depth)
    sim.verify()
    return sim


@pytest.mark.parametrize("n", [1, 3])
def test_a_length_limit_is_foreseen(n: int) -> None:
    sim = simulate(max_tokens=9, n=n, ignore_eos=True)
    prompts, outputs = sum(3 + i for i in range(6)), 6 * n * 9
    assert sim.executor.tokens_computed == prompts + outputs - 6 * n, "no step is in vain"


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_an_end_token_costs_at_most_a_step_in_vain_for_each_step_ahead(steps_ahead: int) -> None:
    fields = {"max_tokens": 40, "stop_token_ids": list(range(0, 50, 6))}
    sim = simulate(depth=1 + steps_ahead, steps_ahead=steps_ahead, requests=20, **fields)
    needed = sum(3 + i for i in range(20)) + sum(len(each.token_ids) - 1 for each in sim.received.values())
    ended = sum(each.last is not None and each.last.finish_reason == "stop" for each in sim.received.values())
    assert ended > 10
    assert 0 <= sim.executor.tokens_computed - needed <= steps_ahead * ended


def test_a_step_ahead_takes_no_more_steps() -> None:
    one_by_one, ahead = simulate(depth=1, steps_ahead=0, max_tokens=20), simulate(max_tokens=20)
    assert ahead.scheduler.stats().steps <= one_by_one.scheduler.stats().steps + 1


def test_almost_every_decode_is_planned_while_the_one_before_is_in_flight() -> None:
    sim = Simulation(num_blocks=200, steps_ahead=1)
    sim.add("r", [1, 2, 3], max_tokens=20)
    sim.step()
    for _ in range(19):
        assert sim.step().num_tokens == 1
        sim.commit()
    assert sim.step().is_empty
    sim.commit()
    sim.verify()


@pytest.mark.parametrize("fields", [{"bad_words_token_ids": [[6, 7]]}, {"thinking_token_budget": 9}], ids=str)
def test_nothing_is_planned_ahead_while_a_sequence_needs_its_newest_token(fields: dict[str, object]) -> None:
    sim = Simulation(num_blocks=200, steps_ahead=1)
    sim.add("plain", [1, 2, 3], max_tokens=30)
    assert sim.scheduler.max_in_flight == 2
    sim.add("edited", [4, 5], max_tokens=3, **fields)
    sim.step()
    assert sim.scheduler.max_in_flight == 1
    assert sim.step().is_empty
    sim.drain()
    sim.verify()
    assert sim.scheduler.max_in_flight == 2


EDITS = [{"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2}, {"bad_words_token_ids": [[6]]}]


@pytest.mark.parametrize("fields", EDITS, ids=str)
def test_edits_that_need_no_newest_token_are_planned_ahead(fields: dict[str, object]) -> None:
    sim = Simulation(num_blocks=200, steps_ahead=1)
    sim.add("edited", [4, 5], max_tokens=3, **fields)
    sim.step()
    assert sim.scheduler.max_in_flight == 2
    assert sim.step().num_tokens == 1
    sim.drain()
    sim.verify()


def test_blocks_of_unknown_tokens_are_hashed_once_they_are_known() -> None:
    """A follow-up finds as many tokens of a finished request as without steps ahead."""
    hits = []
    for steps_ahead in (0, 1):
        sim = Simulation(num_blocks=200, steps_ahead=steps_ahead)
        sim.add("first", [1, 2, 3], max_tokens=18)
        sim.drain(depth=1 + steps_ahead)
        sim.add("second", [1, 2, 3, *sim.received["first", 0].token_ids, 9, 9], max_tokens=2)
        sim.drain(depth=1 + steps_ahead)
        last = sim.received["second", 0].last
        assert last is not None
        hits.append(last.num_cached_tokens)
    assert hits == [20, 20]


def test_a_failed_step_drops_the_one_in_flight_once() -> None:
    sim = Simulation(num_blocks=200, steps_ahead=1)
    sim.add("fails", [1, 2, 3], max_tokens=9)
    sim.step()
    sim.add("waits", [4] * 9, max_tokens=4)
    sim.step()
    ended = sim.commit(error="lost")
    assert [output.request_id for output in ended] == ["fails"]
    assert sim.commit() == []
    sim.drain(depth=2)
    sim.verify()
