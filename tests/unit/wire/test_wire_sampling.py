"""`SamplingParams`: vLLM's defaults, normalised values, and errors that name the field."""

import math
from typing import Any

import pytest
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import MAX_N, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.min_tokens, params.temperature) == (1, 16, 0, 1.0)
    assert (params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1.0, 0, 0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty, params.seed, params.logprobs) == (0.0, 0.0, None, None)
    assert params.stop == params.stop_token_ids == params.bad_words == []
    assert params.detokenize
    assert params.skip_special_tokens
    assert not any((params.ignore_eos, params.include_stop_str_in_output, params.is_greedy))


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("stop", "END", ["END"]),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop_token_ids", [3, 1, 3], [3, 1]),
        ("bad_words", None, []),
        ("seed", -1, None),
        ("seed", 0, 0),
        ("top_k", -1, 0),
        ("temperature", 0.001, 0.01),
        ("temperature", 1e-6, 0.0),
        ("temperature", 2.0, 2.0),
        ("logit_bias", {"5": 200.0, 6: -200, 7: 1}, {5: 100.0, 6: -100.0, 7: 1.0}),
        ("max_tokens", None, None),
        ("n", MAX_N, MAX_N),
        ("logprobs", -1, -1),
        ("logprobs", 0, 0),
    ],
)
def test_values_are_normalised(field: str, given: Any, kept: Any) -> None:
    assert getattr(SamplingParams(**{field: given}), field) == kept


def test_greedy_disables_the_other_settings() -> None:
    params = SamplingParams(temperature=0.0, top_p=0.5, top_k=7, min_p=0.1)
    assert params.is_greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": MAX_N + 1}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": 2, "temperature": 0.0}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_an_invalid_value_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "reads"),
    [({}, True), ({"prompt_logprobs": 0}, False), ({"skip_reading_prefix_cache": True}, False)],
)
def test_prompt_logprobs_and_the_flag_disable_cache_reads(fields: dict[str, Any], reads: bool) -> None:
    assert SamplingParams(**fields).reads_prefix_cache is reads
