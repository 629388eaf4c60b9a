"""A runner that starts a step before the tokens of the one before are known on the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from octavo_engine.runner.executor import CollectedResult
from octavo_engine.sampling.sampler import NOT_FINITE
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.plan import StepResult
from octavo_testing import runner_rig
from octavo_testing.runner_rig import Rig, new, step, tokens
from torch import Tensor


@pytest.fixture
def rig() -> Rig:
    return Rig(starts_ahead=True)


def test_a_step_takes_unknown_tokens_from_the_device(rig: Rig) -> None:
    prompts = rig.start(step(1, 0, 2), step(2, 0, 1), new_seqs=[new(1, 5, 6), new(2, 20)])
    ahead = rig.start(step(2, 1, 1), step(1, 2, 1))
    further = rig.start(step(1, 3, 1), step(3, 0, 2), new_seqs=[new(3, 40, 41)])
    found = [tokens(wait()) for wait in (prompts, ahead, further)]
    assert found == [{1: [7], 2: [21]}, {2: [22], 1: [8]}, {1: [9], 3: [42]}]
    assert rig.batch.seqs[1].token_ids[:5].tolist() == [5, 6, 7, 8, 9]
    assert tokens(rig.run(step(1, 4, 1), step(2, 2, 1))) == {1: [10], 2: [23]}


def test_forks_continue_from_tokens_of_their_own(rig: Rig) -> None:
    crowd = [new(i, 5, 6, temperature=2.0) for i in (1, 2)]
    fork = step(2, 2, 0, logits_from=1)
    first = rig.start(step(1, 0, 2), fork, new_seqs=crowd)
    second = rig.start(step(1, 2, 1), step(2, 2, 1))
    alone = Rig()
    assert tokens(first()) == tokens(alone.run(step(1, 0, 2), step(2, 0, 2), new_seqs=crowd))
    assert tokens(second()) == tokens(alone.run(step(1, 2, 1), step(2, 2, 1)))


PENALTIES = {"temperature": 2.0, "repetition_penalty": 1.7, "frequency_penalty": 1.5, "presence_penalty": -2.0}


def test_penalties_of_steps_ahead_are_those_of_known_tokens(rig: Rig) -> None:
    """One sequence has a prompt of one token, and one starts again in the middle of its output, in another's slot."""
    crowd = [new(1, 5, **PENALTIES), new(2, 20, 21, 20, **PENALTIES, min_tokens=9, logit_bias={22: 5.0}), new(3, 7, 9)]
    plans = [[step(1, 0, 1), step(2, 0, 3), step(3, 0, 2)]]
    plans += [[step(3, i + 1, 1), step(1, i, 1), step(2, i + 2, 1)] for i in range(1, 30)]

    def run(rig: Rig, depth: int) -> list[dict[int, list[int]]]:
        waiting, found = [], []
        for i, plan in enumerate(plans):
            waiting.append(rig.start(*plan, new_seqs=crowd if i == 0 else []))
            if len(waiting) > depth:
                found.append(tokens(waiting.pop(0)()))
        found += [tokens(wait()) for wait in waiting]
        grown = rig.batch.seqs[2].token_ids[:20].tolist()
        again = new(9, *grown, prompt=3, **PENALTIES)
        found.append(tokens(rig.run(step(9, 0, 20), new_seqs=[again], dropped_seqs=[1, 2])))
        return [*found, tokens(rig.run(step(9, 20, 1)))]

    one_by_one = run(Rig(), 0)
    assert run(rig, 1) == one_by_one
    assert len({token for found in one_by_one for token in found.get(1, [])}) > 5


def test_a_dropped_sequence_leaves_no_token_in_its_slot(rig: Rig) -> None:
    results = [rig.start(step(1, 0, 1), new_seqs=[new(1, 5)]), rig.start(step(1, 1, 1))]
    results.append(rig.start(step(2, 0, 3, sample=False), new_seqs=[new(2, 30, 31, 32, 33)], dropped_seqs=[1]))
    for wait in results:
        wait()
    assert tokens(rig.run(step(2, 3, 1))) == {2: [34]}


def test_a_row_with_an_error_is_followed_by_a_step_in_vain(rig: Rig) -> None:
    rig.model.poison = 5
    failed = rig.start(step(1, 0, 1), step(2, 0, 1), new_seqs=[new(1, 5), new(2, 9)])
    in_vain = rig.start(step(1, 1, 1), step(2, 1, 1))
    assert [(seq.token_ids, seq.error) for seq in failed().seqs] == [([], NOT_FINITE), ([10], None)]
    assert tokens(in_vain())[2] == [11]


def test_a_failed_step_and_the_one_after_it_leave_a_working_runner(rig: Rig) -> None:
    rig.model.fail_on = 6
    results = [rig.start(step(1, 0, 1), new_seqs=[new(1, 5)]), rig.start(step(1, 1, 1)), rig.start(step(1, 2, 1))]
    assert [wait().error is None for wait in results] == [True, False, True]
    rig.model.fail_on = -1
    assert tokens(rig.run(step(1, 0, 2), new_seqs=[new(1, 5, 6)], dropped_seqs=[1])) == {1: [7]}


def test_an_error_of_the_device_while_it_is_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    failure: Exception = RuntimeError("a copy failed")

    def wait(self: object) -> float:
        raise failure

    monkeypatch.setattr(runner_rig.RecordedTimer, "seconds", wait)
    assert rig.run(step(1, 0, 1), new_seqs=[new(1, 5)]).error == "RuntimeError: a copy failed"
    failure = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with pytest.raises(EngineDead, match="device is lost"):
        rig.run(step(1, 0, 1), new_seqs=[new(1, 5)], dropped_seqs=[1])


def read_early(values: Tensor) -> Callable[[], Tensor]:
    host = torch.full_like(values, 3)
    return lambda: host


def share_memory() -> Callable[[Tensor], Callable[[], Tensor]]:
    host = torch.full((4,), 3, dtype=torch.int64)

    def fetch(values: Tensor) -> Callable[[], Tensor]:
        host[: len(values)] = values
        return lambda: host[: len(values)]

    return fetch


@pytest.mark.parametrize("mutant", [read_early, share_memory()], ids=["read before the copy", "used again too early"])
def test_a_wrong_fetch_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_rig, "late_fetch", mutant)
    with pytest.raises(AssertionError):
        test_a_step_takes_unknown_tokens_from_the_device(Rig(starts_ahead=True))


def test_a_result_is_collected_once_and_when_it_is_asked_for() -> None:
    collected: list[int] = []

    def collect() -> StepResult:
        collected.append(1)
        return StepResult(step_id=4)

    future = CollectedResult(collect)
    assert not collected
    assert future.result() is future.result()
    assert collected == [1]
