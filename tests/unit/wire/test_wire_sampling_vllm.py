"""Fields and methods of `SamplingParams` that exist for scripts written for vLLM."""

import msgspec
import pytest
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.sampling import RequestOutputKind, SamplingParams


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_kind": "delta"}, "output_kind"),
        ({"stream_interval": 0}, "stream_interval"),
        *(({name: 2**64}, name) for name in ("stream_interval", "thinking_token_budget", "top_k")),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        ({"logprob_token_ids": [1, 1]}, "logprob_token_ids"),
        ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprob_token_ids"),
        ({"logprob_token_ids": ["a"]}, "logprob_token_ids"),
        ({"flat_logprobs": True}, "flat_logprobs"),
        ({"prompt_logprob_start": 3}, "prompt_logprob_start"),
        ({"prompt_logprob_token_ids": [3]}, "prompt_logprob_token_ids"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids"),
        ({"stop_token_ids": "abc"}, "stop_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection"),
    ],
)
def test_an_invalid_or_unsupported_value_is_refused_by_name(fields, param) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param


def test_values_without_effect_are_accepted() -> None:
    params = SamplingParams(flat_logprobs=False, prompt_logprob_start=0, thinking_token_budget=-1, stream_interval=1)
    assert (params.thinking_token_budget, params.output_kind) == (None, RequestOutputKind.CUMULATIVE)


def test_from_optional_takes_none_for_the_default() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, max_tokens=None, logit_bias={"3": 200})
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 0.5, None)
    assert params.logit_bias == {3: 100.0}
    assert SamplingParams.from_optional() == SamplingParams()


def test_a_clone_shares_no_list() -> None:
    params = SamplingParams(stop=["a"], output_kind=RequestOutputKind.DELTA)
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    assert params.stop == ["a"]


def test_a_generation_config_adds_its_other_end_tokens() -> None:
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [2, 7, 9]}, eos_token_id=2)
    assert params.stop_token_ids == [9, 7]
    params = SamplingParams(ignore_eos=True)
    params.update_from_generation_config({"eos_token_id": 7}, eos_token_id=2)
    assert params.stop_token_ids == []


def test_the_engine_core_gets_equal_parameters() -> None:
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, logprob_token_ids=[3], thinking_token_budget=5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
