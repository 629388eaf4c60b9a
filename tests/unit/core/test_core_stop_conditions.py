"""The end of an output and its reason."""

import pytest
from octavo_engine.core.scheduler import Scheduler
from octavo_engine.wire.plan import SeqResult, StepResult
from octavo_engine.wire.records import SeqOutput, TokenLogprobs
from octavo_testing.simulation import sim_config, sim_request

EOS, STOP = 3, 5


def outputs_for(
    sampled: list[list[int]], *, max_model_len: int = 64, prompt: int = 4, **params: object
) -> list[SeqOutput]:
    """Return the outputs if the steps sample these tokens, until the sequence ends."""
    scheduler = Scheduler(sim_config(max_model_len=max_model_len))
    scheduler.add(sim_request("r", [1] * prompt, eos=EOS, **params), 0.0)  # type: ignore[arg-type]
    outputs: list[SeqOutput] = []
    for tokens in sampled:
        assert scheduler.has_work()
        plan = scheduler.step(1.0)
        logprobs = [TokenLogprobs([t], [0.0], 1) for t in tokens]
        result = SeqResult(seq_id=plan.seqs[0].seq_id, token_ids=tokens, logprobs=logprobs)
        outputs += scheduler.commit(StepResult(step_id=plan.step_id, seqs=[result]), 2.0)
    return outputs


@pytest.mark.parametrize(
    ("sampled", "fields", "tokens", "reason", "stop"),
    [
        ([[7], [EOS]], {}, [7, EOS], "stop", None),
        ([[7], [STOP]], {"stop_token_ids": [STOP]}, [7, STOP], "stop", STOP),
        ([[EOS], [8]], {"ignore_eos": True, "max_tokens": 2}, [EOS, 8], "length", None),
        ([[EOS]], {"ignore_eos": True, "stop_token_ids": [EOS]}, [EOS], "stop", EOS),
        ([[7]], {"max_tokens": 1}, [7], "length", None),
        ([[EOS]], {"max_tokens": 1}, [EOS], "stop", None),
        (
            [[EOS], [STOP], [8]],
            {"stop_token_ids": [STOP], "min_tokens": 3, "max_tokens": 3},
            [EOS, STOP, 8],
            "length",
            None,
        ),
        ([[EOS], [EOS]], {"min_tokens": 2}, [EOS, EOS], "stop", None),
        ([[7, 8, EOS, 9]], {"max_tokens": 10}, [7, 8, EOS], "stop", None),
        ([[7, 8, 9]], {"max_tokens": 2}, [7, 8], "length", None),
    ],
)
def test_outputs_end_with_the_right_reason(
    sampled: list[list[int]], fields: dict[str, object], tokens: list[int], reason: str, stop: int
) -> None:
    outputs = outputs_for(sampled, **fields)
    assert [t for o in outputs for t in o.token_ids] == tokens
    assert [t for o in outputs for entry in o.logprobs or [] for t in entry.token_ids] == tokens
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop)
    assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)


def test_min_tokens_does_not_push_past_the_model_length() -> None:
    outputs = outputs_for([[7], [7]], max_model_len=6, prompt=4, min_tokens=9, max_tokens=9)
    assert outputs[-1].finish_reason == "length"


def test_the_last_record_has_the_timing() -> None:
    first, last = outputs_for([[7], [8]], max_tokens=2)
    assert first.timing is None
    assert last.timing is not None
    assert (last.timing.queue_s, last.timing.prefill_s, last.timing.decode_s, last.timing.inference_s) == (1, 1, 0, 1)


def test_a_step_without_token_repeats_over_a_copy_of_a_full_block() -> None:
    scheduler = Scheduler(sim_config(block_size=4))
    scheduler.add(sim_request("r", [1, 2, 3, 4]), 0.0)
    plan = scheduler.step(1.0)
    assert scheduler.commit(StepResult(step_id=plan.step_id), 2.0) == []
    again = scheduler.step(3.0)
    (step,) = again.seqs
    assert (step.start, step.num_tokens, step.sample) == (3, 1, True)
    assert len(again.copies) == 1, "the block can be found by its hash, so it must not be written"
    assert step.block_ids == [[again.copies[0][1]]]
