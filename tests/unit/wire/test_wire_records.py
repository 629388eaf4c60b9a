"""The computed values of the records, and the wording that clients parse."""

import pytest
from octavo_engine.process import messages
from octavo_engine.wire.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Overloaded
from octavo_engine.wire.plan import SeqStep, StepPlan
from octavo_engine.wire.records import CoreOutputs, EngineStats, ErrorInfo, ErrorKind, SeqOutput


@pytest.mark.parametrize("kind", ["invalid_request", "internal"])
def test_the_kind_of_an_error_crosses_the_process_border(kind: ErrorKind) -> None:
    output = SeqOutput(request_id="r", finish_reason="error", error=ErrorInfo("no token left", kind))
    sent = messages.encode(messages.Outputs(CoreOutputs(outputs=[output])))
    received = messages.decode_from_core(sent)
    assert isinstance(received, messages.Outputs)
    assert received.core.outputs == [output]


def test_kv_usage_counts_referenced_blocks_only() -> None:
    assert EngineStats(free_blocks=1, cached_blocks=6, in_use_blocks=3, total_blocks=10).kv_usage == 0.3
    assert EngineStats().kv_usage == 0.0


def test_a_plan_counts_its_tokens_including_drafts() -> None:
    steps = [
        SeqStep(seq_id=1, start=0, num_tokens=5, sample=False),
        SeqStep(seq_id=2, start=9, num_tokens=1, sample=True, draft_token_ids=[7, 8]),
    ]
    assert StepPlan(step_id=1, seqs=steps).num_tokens == 8


@pytest.mark.parametrize(
    ("plan", "empty"),
    [
        (StepPlan(step_id=1), True),
        (StepPlan(step_id=1, dropped_seqs=[1]), False),
        (StepPlan(step_id=1, swap_out=[(1, 2)]), False),
        (StepPlan(step_id=1, swap_in=[(1, 2)]), False),
        (StepPlan(step_id=1, copies=[(1, 2)]), False),
        (StepPlan(step_id=1, seqs=[SeqStep(seq_id=1, start=0, num_tokens=1, sample=True)]), False),
    ],
)
def test_a_plan_is_empty_when_there_is_nothing_to_do(plan: StepPlan, empty: bool) -> None:
    assert plan.is_empty is empty


def test_context_length_is_refused_in_the_words_that_clients_parse() -> None:
    error = ContextLengthExceeded(max_model_len=8192, num_requested=100, num_input=8100)
    assert isinstance(error, InvalidRequest)
    assert error.param == "input_tokens"
    assert str(error) == (
        "This model's maximum context length is 8192 tokens. However, you requested 100 output tokens and your prompt "
        "contains at least 8100 input tokens, for a total of at least 8200 tokens. Please reduce the length of the "
        "input prompt or the number of requested output tokens. (parameter=input_tokens, value=8100) "
        "(code=context_length_exceeded)"
    )


def test_other_errors_have_their_documented_contents() -> None:
    assert str(ModelNotFound("gpt-9")) == "The model `gpt-9` does not exist."
    assert Overloaded("full", retry_after_s=2.5).retry_after_s == 2.5
