"""The runner on a model whose logits can be computed by hand: plans, order of work, errors, costs."""

import pytest
import torch
from octavo_engine.runner.engine_memory import EngineMemory
from octavo_engine.runner.executor import LocalExecutor
from octavo_engine.sampling.sampler import NOT_FINITE
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.plan import SeqStep, StepPlan
from octavo_testing.runner_rig import VOCAB, Counting, Rig, new, step, tokens


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_chunked_prefill_and_decodes_give_the_right_tokens(rig: Rig) -> None:
    assert tokens(rig.run(step(1, 0, 2, sample=False), new_seqs=[new(1, 5, 6, 7)])) == {}
    assert tokens(rig.run(step(1, 2, 1))) == {1: [8]}
    assert tokens(rig.run(step(1, 3, 1))) == {1: [9]}
    assert rig.model.head_rows == [1, 1]


def test_only_sampled_rows_go_through_the_head(rig: Rig) -> None:
    rig.run(step(1, 0, 40), step(2, 0, 30, sample=False), new_seqs=[new(1, *range(40)), new(2, *range(30))])
    assert rig.model.head_rows == [1]


def test_forks_sample_from_the_last_row_of_another(rig: Rig) -> None:
    crowd = [new(i, 5, 6, temperature=2.0) for i in (1, 2, 3)]
    fork = {"num_tokens": 0, "start": 2, "logits_from": 1}
    result = rig.run(step(1, 0, 2), SeqStep(seq_id=2, sample=True, **fork), step(3, 0, 2), new_seqs=crowd)
    assert sorted(tokens(result)) == [1, 2, 3]
    assert rig.model.head_rows == [2]
    drawn = tokens(result)
    again = rig.run(*(step(i, 2, 1) for i in (1, 2, 3)))
    assert sorted(tokens(again)) == [1, 2, 3]
    assert all(rig.batch.seqs[i].token_ids[2] == drawn[i][0] for i in (1, 2, 3))


def test_a_stream_continues_after_preemption(rig: Rig) -> None:
    """Sampling is keyed by (seed, position): a preempted sequence resumed from its tokens draws equal tokens."""
    hot = {"temperature": 2.0, "max_tokens": 99}
    first = new(1, 5, 6, **hot)
    drawn = [tokens(rig.run(step(1, 0, 2), new_seqs=[first]))[1][0]]
    drawn += [tokens(rig.run(step(1, 2 + i, 1)))[1][0] for i in range(5)]
    resumed = new(1, 5, 6, *drawn[:3], prompt=2, **hot)
    after = [tokens(rig.run(step(1, 0, 5), new_seqs=[resumed], dropped_seqs=[1]))[1][0]]
    after += [tokens(rig.run(step(1, 5 + i, 1)))[1][0] for i in range(2)]
    assert after == drawn[3:]


def test_a_step_runs_its_work_in_order(rig: Rig) -> None:
    rig.run(
        step(1, 0, 1),
        new_seqs=[new(1, 5)],
        swap_out=[(0, 1)],
        swap_in=[(1, 2)],
        copies=[(2, 3)],
    )
    moves = [("out", [(0, 1)]), ("in", [(1, 2)]), "synchronize", ("copy", [(2, 3)])]
    assert rig.backend.calls == [*moves, "forward", "synchronize"]


def test_dropped_sequences_make_room_for_new_ones(rig: Rig) -> None:
    rig.run(*(step(i, 0, 1) for i in range(4)), new_seqs=[new(i, 5) for i in range(4)])
    result = rig.run(
        *(step(i, 0, 1) for i in range(4, 8)), dropped_seqs=[0, 1, 2, 3], new_seqs=[new(i, 9) for i in range(4, 8)]
    )
    assert tokens(result) == {i: [10] for i in range(4, 8)}


def test_a_plan_without_sequences_gives_no_results(rig: Rig) -> None:
    assert tokens(rig.run(swap_out=[(0, 1)])) == {}


def test_prompt_logprobs_are_returned_row_by_row(rig: Rig) -> None:
    asking = new(1, 5, 6, 8, 9, prompt_logprobs=1, logprobs=0)
    first = rig.run(step(1, 0, 2, sample=False, num_prompt_logprobs=2), new_seqs=[asking])
    second = rig.run(step(1, 2, 2, num_prompt_logprobs=1))
    entries = [*(first.seqs[0].prompt_logprobs or []), *(second.seqs[0].prompt_logprobs or [])]
    assert [e.token_ids for e in entries] == [[6, 6], [8, 7], [9, 9]]
    assert (entries[0].rank, entries[2].rank) == (1, 1)
    assert entries[1].rank > 1
    assert first.seqs[0].token_ids == []
    assert second.seqs[0].token_ids == [10]
    assert second.seqs[0].logprobs is not None


def test_many_rows_are_sampled_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo_engine.runner.batch.MAX_LOGITS", 2 * VOCAB)
    added = [new(i, 10 * i, 10 * i + 1, 10 * i + 2, prompt_logprobs=0) for i in (1, 2, 3)]
    result = rig.run(*(step(i, 0, 3, num_prompt_logprobs=2) for i in (1, 2, 3)), new_seqs=added)
    assert tokens(result) == {1: [13], 2: [23], 3: [33]}
    assert max(rig.model.head_rows) == 2


def test_a_failed_step_returns_an_error_and_the_next_step_works(rig: Rig) -> None:
    rig.model.fail_on = 30
    failed = rig.run(step(1, 0, 1), step(2, 0, 1), new_seqs=[new(1, 5), new(2, 30)])
    assert failed.error == "RuntimeError: the kernel broke"
    assert failed.step_id == 7
    assert failed.seqs == []
    assert tokens(rig.run(step(1, 0, 1), dropped_seqs=[2])) == {1: [6]}


def test_logits_that_are_not_finite_end_one_sequence(rig: Rig) -> None:
    rig.model.poison = 30
    result = rig.run(step(1, 0, 1), step(2, 0, 1), new_seqs=[new(1, 5), new(2, 30)])
    assert [(s.token_ids, s.error) for s in result.seqs] == [([6], None), ([], NOT_FINITE)]


def test_costs_are_measured_from_large_chunks_and_swaps(rig: Rig) -> None:
    small = rig.run(step(1, 0, 1), new_seqs=[new(1, *range(200))])
    assert (small.costs.prefill_token_s, small.costs.swap_block_s) == (0.0, 0.0)
    large = rig.run(step(1, 0, 200), swap_in=[(0, 1), (1, 2)])
    assert large.costs.prefill_token_s > 0
    assert large.costs.swap_block_s > 0


def test_the_local_executor_runs_plans_until_shutdown(rig: Rig) -> None:
    memory = EngineMemory(
        rig.runner,
        rig.backend,  # type: ignore[arg-type]
        rig.device,
        num_blocks=1,
        load_model=Counting,
        make_host=lambda: None,
    )
    executor = LocalExecutor(rig.runner, rig.compiler, memory)
    plan = StepPlan(step_id=3, seqs=[step(1, 0, 1)], new_seqs=[new(1, 5)])
    assert tokens(executor.submit(plan).result(timeout=0)) == {1: [6]}
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(plan).result(timeout=0)


def test_costs_are_measured_when_the_device_has_finished(rig: Rig) -> None:
    rig.run(step(1, 0, 2, sample=False), new_seqs=[new(1, 5, 6, 7)], swap_in=[(0, 1)])
    assert rig.backend.calls == [("in", [(0, 1)]), "synchronize", "forward", "synchronize"]


def test_a_step_without_memory_fails_alone_and_memory_is_released(rig: Rig) -> None:
    rig.model.fail_on, rig.model.failure = 5, torch.OutOfMemoryError("CUDA out of memory.")
    failed = rig.run(step(1, 0, 1), new_seqs=[new(1, 5)])
    assert "OutOfMemoryError" in (failed.error or "")
    assert rig.backend.calls == ["forward", "release"]
    assert tokens(rig.run(step(2, 0, 1), new_seqs=[new(2, 8)], dropped_seqs=[1])) == {2: [9]}


@pytest.mark.parametrize(
    "failure",
    [torch.AcceleratorError("CUDA error: unspecified launch failure"), RuntimeError("Triton Error [CUDA]: bad")],
)
def test_a_lost_device_ends_the_engine(rig: Rig, failure: Exception) -> None:
    rig.model.fail_on, rig.model.failure = 5, failure
    with pytest.raises(EngineDead, match="device is lost"):
        rig.run(step(1, 0, 1), new_seqs=[new(1, 5)])


def test_a_sleeping_engine_releases_the_memory_of_its_device(rig: Rig) -> None:
    memory = EngineMemory(
        rig.runner,
        rig.backend,  # type: ignore[arg-type]
        rig.device,
        num_blocks=1,
        load_model=Counting,
        make_host=lambda: None,
    )
    memory.release("weights")
    assert rig.backend.calls == ["release"]


def test_warming_up_counts_no_costs_and_raises_errors(rig: Rig) -> None:
    plan = StepPlan(step_id=0, new_seqs=[new(1, *range(200))], seqs=[step(1, 0, 200)])
    rig.runner.warm_up([plan, StepPlan(step_id=0, dropped_seqs=[1])])
    assert rig.run(step(2, 0, 1), new_seqs=[new(2, 5)]).costs.prefill_token_s == 0
    rig.model.fail_on = 5
    with pytest.raises(RuntimeError, match="broke"):
        rig.runner.warm_up([StepPlan(step_id=0, new_seqs=[new(3, 5)], seqs=[step(3, 0, 1)])])
