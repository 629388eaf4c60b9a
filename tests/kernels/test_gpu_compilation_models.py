"""All architectures compile for sm_80 and sm_90: without spills, and nothing is compiled after the first steps."""

import pytest
from octavo_engine.models.registry import ARCHITECTURES
from octavo_testing.gpu_compiler import MODELS, assert_fast, compile_steps

pytestmark = pytest.mark.slow


def test_every_architecture_is_compiled() -> None:
    assert MODELS.keys() == ARCHITECTURES.keys()


HEAD_SIZES = ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM")  # 128, 64 and 256
CASES = [*((model, "bfloat16") for model in MODELS), *((model, "float32") for model in HEAD_SIZES)]


@pytest.mark.parametrize(("model", "dtype"), CASES)
@pytest.mark.parametrize("sm", [80, 90])
def test_a_model_compiles(model: str, sm: int, dtype: str) -> None:
    report = compile_steps(model, sm=sm, dtype=dtype)
    assert report.later == 0
    if not any(name in model for name in ("Moe", "Mixtral", "Olmoe")):
        assert all(len(launches) <= (12 if "Gemma" in model else 10) for launches in report.layer_launches)
    assert_fast(report, tensor_cores=dtype == "bfloat16")
