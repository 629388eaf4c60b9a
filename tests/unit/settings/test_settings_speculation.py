"""`speculative_config` with vLLM's fields, and vLLM's short arguments, which set its fields."""

import pytest
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.wire.errors import StartupError
from octavo_server.cli.main import build_parser
from octavo_server.cli.serve import engine_config_of
from octavo_server.cli.vllm_flags import unused_flags

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
DRAFT = {"model": "small", "num_speculative_tokens": 3}


@pytest.mark.parametrize("given", [NGRAM, DRAFT])
@pytest.mark.parametrize(
    "more",
    [
        {"enforce_eager": True},
        {"disable_padded_drafter_batch": True, "max_model_len": 128, "code_revision": "main"},
        {"draft_sample_method": "probabilistic", "rejection_sample_method": "standard"},
        {"parallel_drafting": False, "quantization": None, "kv_cache_dtype": "auto"},
    ],
)
def test_vllms_fields_without_effect_change_nothing(given, more):
    assert resolve_config(speculative_config=given | more) == resolve_config(speculative_config=given)


@pytest.mark.parametrize(
    "more", [{"parallel_drafting": True}, {"quantization": "fp8"}, {"rejection_sample_method": "synthetic"}, {"x": 1}]
)
def test_fields_that_ask_for_something_else_are_refused(more):
    with pytest.raises(StartupError, match=next(iter(more))):
        resolve_config(speculative_config=NGRAM | more)


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ({"spec_method": "ngram", "spec_tokens": 3}, NGRAM),
        ({"spec_model": "small", "spec_tokens": 3}, DRAFT),
        ({"spec_tokens": 3, "speculative_config": '{"method": "ngram"}'}, NGRAM),
        ({"spec_tokens": 3, "speculative_config": NGRAM}, NGRAM),
        ({"spec_method": None, "spec_tokens": None, "speculative_config": NGRAM}, NGRAM),
    ],
)
def test_short_arguments_set_fields(arguments, same):
    assert resolve_config(**arguments) == resolve_config(speculative_config=same)


@pytest.mark.parametrize("given", [NGRAM, NGRAM | {"prompt_lookup_max": 2}, DRAFT, DRAFT | {"revision": "v1"}])
def test_short_arguments_may_repeat_those_of_an_instance(given):
    instance = resolve_config(speculative_config=given).speculative_config
    for short in ({"spec_tokens": 3}, {"spec_method": instance.method}):
        assert resolve_config(speculative_config=instance, **short).speculative_config == instance
    for short in ({"spec_tokens": 4}, {"spec_model": "other"}):
        with pytest.raises(StartupError, match=r"spec_|has no effect"):
            resolve_config(speculative_config=instance, **short)


@pytest.mark.parametrize("config", [(), ("--speculative-config", '{"method": "ngram"}')])
def test_the_flags_set_fields(config):
    args = build_parser().parse_args(["serve", "--spec-method", "ngram", "--spec-tokens", "3", *config])
    assert engine_config_of(args).speculative_config == resolve_config(speculative_config=NGRAM).speculative_config


def test_short_arguments_that_contradict_are_refused():
    with pytest.raises(StartupError, match="spec_tokens=4 and speculative_config"):
        resolve_config(spec_tokens=4, speculative_config=NGRAM)
    with pytest.raises(StartupError, match="num_speculative_tokens"):
        resolve_config(spec_method="ngram")


@pytest.mark.parametrize("value", ['{"method": "ngram", "enforce_eager": true}', '{"method": "ngram"}'])
def test_the_start_names_fields_without_effect(value):
    args = build_parser().parse_args(["serve", "--speculative-config", value, "--spec-tokens", "3"])
    named = ["accepted without effect here: --speculative-config.enforce_eager"] if "eager" in value else []
    assert unused_flags(args) == named
