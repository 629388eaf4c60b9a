import pytest
from octavo_engine.config import EngineConfig
from octavo_engine.engine_args import resolve_config
from octavo_engine.wire.errors import StartupError


def test_no_arguments_give_the_defaults():
    assert resolve_config() == EngineConfig()


def test_fields_have_vllms_names():
    config = resolve_config(model="org/m", max_model_len=128, dtype="half", served_model_name="m", watermark=0)
    assert (config.model, config.max_model_len, config.dtype) == ("org/m", 128, "float16")
    assert (config.served_model_name, config.watermark) == (("m",), 0.0)


@pytest.mark.parametrize("value", [None, -1, "auto"])
def test_the_length_is_fitted_to_the_memory_by_default(value):
    assert resolve_config(max_model_len=value).max_model_len is None


def test_an_unknown_name_gets_its_near_matches():
    with pytest.raises(TypeError, match=r"'max_model_length' is not an engine argument\. Did you mean max_model_len"):
        resolve_config(max_model_length=128)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("tensor_parallel_size", 2, 1),
        ("pipeline_parallel_size", 4, 1),
        ("quantization", "awq", None),
        ("enable_lora", True, False),
        ("speculative_config", {"method": "ngram"}, None),
        ("kv_cache_dtype", "fp8", "auto"),
        ("trust_remote_code", True, False),
    ],
)
def test_an_unimplemented_feature_is_refused_but_its_default_passes(name, value, accepted):
    with pytest.raises(StartupError, match=f"^{name}=.* is not supported by this version.*{accepted!r}"):
        resolve_config(**{name: value})
    assert resolve_config(**{name: accepted}) == EngineConfig()


@pytest.mark.parametrize("name", ["enforce_eager", "disable_log_stats"])
def test_an_argument_without_effect_passes(name):
    assert resolve_config(**{name: True}) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dtype", "int3", "dtype='int3'.*use one of auto, float32, bfloat16, float16"),
        ("preemption_mode", "never", "preemption_mode='never'.*use one of auto, swap, recompute"),
        ("block_size", 0, "block_size must be between 1 and 1024, got 0"),
        ("block_size", "16", "block_size='16': Expected `int`, got `str`"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization must be between 0.01 and 1.0, got 1.5"),
        ("swap_space", -1, "swap_space must be at least 0"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_a_value_that_cannot_be_served_is_named(name, value, message):
    with pytest.raises(StartupError, match=message):
        resolve_config(**{name: value})


def test_nan_is_out_of_range():
    with pytest.raises(StartupError, match="watermark must be between"):
        resolve_config(watermark=float("nan"))
