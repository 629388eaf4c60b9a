"""An exception in the work for one sequence of a step ends this sequence, and no other."""

from collections.abc import Callable
from typing import Any

import pytest
from octavo_engine.runner import runner
from octavo_engine.sampling import sampler
from octavo_engine.sampling.logit_edits import TokenCounts, TokenMasks
from octavo_engine.wire.errors import EngineDead
from octavo_testing.runner_rig import Rig, new, step

#: Whose work it is, and the fields that need it.
PLACES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "masks": (TokenMasks, "apply", {"logit_bias": {1: 1.0}}),
    "penalties": (TokenCounts, "penalty", {"presence_penalty": 0.1}),
    "requested ids": (sampler, "logprobs_of_ids", {"logprob_token_ids": [3]}),
    "prompt": (runner, "prompt_logprobs", {"prompt_logprobs": 1}),
}


def failing_second(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    calls = iter(range(1000))

    def fail(*args: Any, **fields: Any) -> Any:
        if next(calls) == 1:
            raise error
        return call(*args, **fields)

    return fail


def run_three(rig: Rig, fields: dict[str, Any], *, sample: bool = True) -> dict[int, Any]:
    added = [new(i, 10 * i, 10 * i + 1, 10 * i + 2, **fields) for i in (1, 2, 3)]
    rows = 2 if "prompt_logprobs" in fields else 0
    result = rig.run(*(step(i, 0, 3, num_prompt_logprobs=rows, sample=sample) for i in (1, 2, 3)), new_seqs=added)
    assert result.error is None
    return {each.seq_id: each for each in result.seqs}


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_in_one_result_ends_no_other(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig, (owner, name, fields) = Rig(), PLACES[place]
    monkeypatch.setattr(owner, name, failing_second(getattr(owner, name), ValueError("no such row")))
    results = run_three(rig, fields)
    assert {i: each.token_ids for i, each in results.items()} == {1: [13], 2: [], 3: [33]}
    assert [results[i].error is None for i in (1, 2, 3)] == [True, False, True]
    assert results[2].error.kind == "internal"
    assert "no such row" in results[2].error.message
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_fault_before_the_end_of_the_prompt_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "prompt_logprobs", failing_second(runner.prompt_logprobs, MemoryError("full")))
    results = run_three(Rig(), {"prompt_logprobs": 1}, sample=False)
    assert [results[i].error is None for i in (1, 2, 3)] == [True, False, True]


def test_a_lost_rank_still_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "prompt_logprobs", failing_second(runner.prompt_logprobs, EngineDead("gone")))
    with pytest.raises(EngineDead, match="gone"):
        run_three(Rig(), {"prompt_logprobs": 1})
