import math
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_origin

import octavo_engine
import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.declare import all_settings
from octavo_engine.settings.engine_args import resolve_config, unused_arguments
from octavo_engine.settings.vllm import ANY, ENGINE_ARGUMENTS, VllmArgument, describe_unused, unused_variables
from octavo_engine.wire.errors import StartupError


def test_no_arguments_give_the_defaults():
    assert resolve_config() == EngineConfig()


def test_fields_have_vllms_names():
    config = resolve_config(model="org/m", max_model_len=128, dtype="half", served_model_name="m", watermark=0)
    assert (config.model, config.max_model_len, config.dtype) == ("org/m", 128, "float16")
    assert (config.served_model_name, config.watermark) == (("m",), 0.0)


def test_the_implementation_of_the_model_has_vllms_names():
    given = ("auto", "vllm", "octavo", "transformers")
    assert [resolve_config(model_impl=name).model_impl for name in given] == [
        "auto",
        "octavo",
        "octavo",
        "transformers",
    ]
    with pytest.raises(
        StartupError, match=r"model_impl must be one of auto, octavo, transformers, .* got 'terratorch'"
    ):
        resolve_config(model_impl="terratorch")


@pytest.mark.parametrize(
    "value", [None, "int8", "int4", "gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "gguf"]
)
def test_weights_are_quantised_to_a_known_type(value):
    assert resolve_config(quantization=value).quantization == value
    assert resolve_config(quantization="gptq_marlin").quantization == "gptq"
    assert resolve_config(load_format="bitsandbytes").load_format == "auto"


@pytest.mark.parametrize("value", ["AWQ", "fbgemm_fp8", "modelopt", "INT8", "", 8])
def test_another_quantisation_is_refused_with_the_ones_that_exist(value):
    with pytest.raises(
        StartupError, match=rf"^quantization={value!r} is not supported .* .*'awq', 'compressed-tensors', 'fp8'"
    ):
        resolve_config(quantization=value)


@pytest.mark.parametrize("value", [None, -1, "auto"])
def test_the_length_is_fitted_to_the_memory_by_default(value):
    assert resolve_config(max_model_len=value).max_model_len is None


def test_an_unknown_name_gets_its_near_matches():
    with pytest.raises(TypeError, match=r"'max_model_length' is not an engine argument\. Did you mean max_model_len"):
        resolve_config(max_model_length=128)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("data_parallel_size", 4, 1),
        ("quantization", "modelopt", None),
        ("enable_prompt_adapter", True, False),
        ("tokenizer_mode", "mistral", "hf"),
        ("data_parallel_size", 2, 1),
    ],
)
def test_an_unimplemented_feature_is_refused_but_its_default_passes(name, value, accepted):
    choices = "Leave it out" if accepted is None else repr(accepted)
    with pytest.raises(StartupError, match=f"^{name}=.* is not supported by this version: .*{choices}"):
        resolve_config(**{name: value})
    assert resolve_config(**{name: accepted}) == EngineConfig()


def test_an_argument_without_effect_passes():
    assert resolve_config(disable_log_stats=True) == EngineConfig()


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ({"enforce_eager": True, "data_parallel_size": 1, "async_scheduling": None, "max_num_seqs": 4}, []),
        ({"enforce_eager": False}, []),
        (
            {"trust_remote_code": True, "compilation_config": 3},
            [
                "accepted without effect here: --trust-remote-code (no code from checkpoints is ever run), "
                "--compilation-config"
            ],
        ),
        ({"structured_outputs_config": {"backend": "auto"}}, []),
        (
            {"structured_outputs_config": {"backend": "auto", "disable_fallback": True}},
            ["accepted without effect here: --structured-outputs-config.disable_fallback"],
        ),
        (
            {"max_num_partial_prefills": 4, "show_hidden_metrics_for_version": "0.31"},
            [
                "accepted without effect here: --max-num-partial-prefills (prompts share each step, see "
                "--max-step-ms), --show-hidden-metrics-for-version (old names are always exposed)"
            ],
        ),
        (
            {"skip_tokenizer_init": True},
            ["accepted without effect here: --skip-tokenizer-init (the tokenizer is loaded, and outputs have text)"],
        ),
        ({"num_scheduler_steps": 8}, ["deprecated by vLLM and without effect here, leave out: --num-scheduler-steps"]),
        ({"limit_mm_per_prompt": {"image": 0, "video": {"count": 0}}}, []),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "kv_cache_dtype": "auto"}}, []),
        (
            {
                "speculative_config": '{"model": "m", "enforce_eager": true, "max_model_len": 9}',
                "cudagraph_metrics": True,
            },
            [
                "accepted without effect here: --speculative-config.enforce_eager, --speculative-config.max_model_len, "
                "--cudagraph-metrics"
            ],
        ),
    ],
)
def test_arguments_without_effect_are_named(arguments, lines):
    assert describe_unused(unused_arguments(arguments), as_flags=True) == lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"structured_outputs_config": {"backend": "bogus"}},
            r"structured_outputs_config\.backend='bogus' .*'xgrammar'",
        ),
        ({"structured_outputs_config": {"colour": 1}}, "has no field 'colour': leave it out, or use one of backend"),
        (
            {"structured_outputs_config": {"enable_in_reasoning": True}},
            "enable_in_reasoning=True is not supported",
        ),
        ({"structured_outputs_config": {"disable_any_whitespace": "no"}}, "disable_any_whitespace='no'"),
        ({"limit_mm_per_prompt": {"video": 1}}, 'video=1 is not supported: .*"image"'),
        ({"limit_mm_per_prompt": {"image": -1}}, "image=-1"),
        ({"limit_mm_per_prompt": 3}, "must be a JSON object"),
        ({"rope_scaling": {"factor": 2.0}}, r"""--hf-overrides '\{"rope_scaling": """),
        ({"rope_theta": 1e6}, r"""--hf-overrides '\{.*"rope_theta": """),
        ({"disable_sliding_window": True}, "--hf-overrides"),
        ({"language_model_only": True}, r"""--limit-mm-per-prompt '\{"image": 0\}' refuses them"""),
        ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, "=True is not .* has the scales of the checkpoint"),
        ({"override_generation_config": {"top_q": 1}}, "fields of temperature, top_p"),
    ],
)
def test_a_refused_entry_is_named(arguments, message):
    with pytest.raises(StartupError, match=message):
        resolve_config(**arguments)


@pytest.mark.parametrize("name", ["disable_any_whitespace", "disable_additional_properties"])
def test_structured_outputs_of_all_requests_are_configured(name):
    for arguments in ({name: True}, {"structured_outputs_config": {name: True, "backend": "auto"}},
                      {f"guided_decoding_{name}": True}):  # fmt: skip
        assert resolve_config(**arguments) == EngineConfig(**{name: True})
        assert unused_arguments(arguments) == []
    assert resolve_config(structured_outputs_config={name: False}) == EngineConfig()


def test_every_refused_argument_says_why():
    rows = {
        **ENGINE_ARGUMENTS,
        **{f"s.{n}": a for n, a in ENGINE_ARGUMENTS["structured_outputs_config"].fields.items()},
    }
    refusing = {name: row for name, row in rows.items() if ANY not in (row.fulfilled, row.harmless)}
    silent = [name for name, row in refusing.items() if row.missing == VllmArgument().missing]
    assert [name for name in silent if not row_accepts_both(rows[name])] == []


def row_accepts_both(row):
    return row.is_switch and True in (*row.fulfilled, *row.harmless) and False in (*row.fulfilled, *row.harmless)


@pytest.mark.parametrize(("given", "found"), [("hf", "auto"), ("runai_streamer", "safetensors"), ("gguf", "gguf")])
def test_load_formats_have_vllms_names(given, found):
    assert resolve_config(load_format=given).load_format == found


def test_environment_of_vllm_without_effect_is_named_once():
    environ = {
        "VLLM_USE_V1": "1",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "VLLM_PORT_80_TCP_ADDR": "10.0.0.1",
        "HOME": "/",
    }
    assert unused_variables(environ) == ["set without effect here: VLLM_ATTENTION_BACKEND, VLLM_USE_V1"]
    assert unused_variables({"HOME": "/"}) == []


def test_the_package_has_a_version():
    assert octavo_engine.__version__ == version("octavo-engine")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dtype", "int3", "dtype must be one of auto, float32, bfloat16, float16, .* got 'int3'"),
        ("preemption_mode", "never", "preemption_mode must be one of auto, swap, recompute, got 'never'"),
        ("block_size", 0, "block_size must be between 1 and 1024, got 0"),
        ("block_size", "16", "block_size must be a whole number, between 1 and 1024, got '16'"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization must be between 0.01 and 1.0, got 1.5"),
        ("swap_space", -1, "swap_space must be at least 0"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_a_value_that_cannot_be_served_is_named(name, value, message):
    with pytest.raises(StartupError, match=message):
        resolve_config(**{name: value})


BOUNDED = [declared for declared in all_settings(EngineConfig) if not declared.choices and declared.bounds]


@pytest.mark.parametrize("declared", BOUNDED, ids=lambda declared: declared.name)
def test_a_value_beyond_each_limit_is_refused_with_it(declared):
    for value in (declared.ge - 1, declared.le + 1):
        if abs(value) < math.inf:
            with pytest.raises(StartupError, match=f"^{declared.name} must be {declared.bounds}, got {value}"):
                resolve_config(**{declared.name: value})


@pytest.mark.parametrize("name", ["model", "tokenizer", "trace", "generation_config", "chat_template", "download_dir"])
def test_a_path_may_be_given_for_text(name):
    assert getattr(resolve_config(**{name: Path("/folder")}), name) == "/folder"


OBJECT = object()
#: Type of a setting -> values of other types.
WRONG: dict[Any, tuple[Any, ...]] = {
    str: (5, 2.5, True, ["x"], {"a": 1}, b"x", OBJECT),
    bool: (1, 0, "true", [True], OBJECT),
    int: ("5", 2.5, True, [5], {5: 5}, OBJECT),
    float: ("0.5", True, [0.5], OBJECT),
    tuple: (2.5, [["x"]], [{}], {"a": {}}, OBJECT),
    dict: ("x", "[]", "{", 5, True, ["x"], OBJECT),
    Literal: (5, "other", True, ["x"], {}, OBJECT),
}


def wrong_values(declared):
    kind = dict if declared.is_json or declared.name == "speculative_config" else get_origin(declared.kind)
    return WRONG[kind or declared.kind]


@pytest.mark.parametrize("make", [resolve_config, EngineConfig])
@pytest.mark.parametrize("declared", all_settings(EngineConfig), ids=lambda declared: declared.name)
def test_a_value_of_a_wrong_type_is_refused_with_the_right_one(declared, make):
    for value in wrong_values(declared):
        with pytest.raises(StartupError) as caught:
            make(**{declared.name: value})
        message = str(caught.value)
        assert message.startswith((declared.name, "lora_modules"))
        assert declared.name == "lora_modules" or repr(value) in message
        assert any(remedy in message for remedy in (" must be ", ": use ", ": give ", ": serve "))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("trace", 5, "text"),
        ("model", None, "text"),
        ("enable_lora", 1, "true or false"),
        ("seed", "5", "a whole number"),
        ("swap_space", "5", "a number, at least 0"),
        ("cudagraph_capture_sizes", [0], "between 1 and 1024"),
        ("cudagraph_capture_sizes", [1.5], "a list of values, between 1 and 1024"),
        ("served_model_name", 5, "a list of values"),
        ("hf_overrides", 5, "a JSON object"),
    ],
)
def test_the_refusal_says_what_the_value_must_be(name, value, rule):
    for make in (resolve_config, EngineConfig):
        with pytest.raises(StartupError) as caught:
            make(**{name: value})
        assert str(caught.value) == f"{name} must be {rule}, got {value!r}."


def test_nan_is_out_of_range():
    with pytest.raises(StartupError, match="watermark must be between"):
        resolve_config(watermark=float("nan"))
