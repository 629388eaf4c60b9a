"""All architectures, and parts of ranks, compile for sm_80 and sm_90: without spills, and nothing compiles later."""

from collections.abc import Iterator

import pytest
from octavo_engine.models.registry import ARCHITECTURES
from octavo_testing.gpu_compiler import MODELS, GpuCompiler, assert_fast

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler() -> Iterator[GpuCompiler]:
    with GpuCompiler.start() as started:
        yield started


def test_every_architecture_is_compiled() -> None:
    assert MODELS.keys() == ARCHITECTURES.keys()


HEAD_SIZES = ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM")  # 128, 64 and 256
CASES = [*((model, "bfloat16") for model in MODELS), *((model, "float32") for model in HEAD_SIZES)]


@pytest.mark.parametrize(("model", "dtype"), CASES)
@pytest.mark.parametrize("sm", [80, 90])
def test_a_model_compiles(compiler: GpuCompiler, model: str, sm: int, dtype: str) -> None:
    report = compiler.compile_steps(model, sm=sm, dtype=dtype)
    assert report.later == 0
    if not any(name in model for name in ("Moe", "Mixtral", "Olmoe")):
        assert all(len(launches) <= (12 if "Gemma" in model else 10) for launches in report.layer_launches)
    assert_fast(report, tensor_cores=dtype == "bfloat16")


#: Heads of a rank: 16 and 4, 8 and 2, 16 and 2, 8 and 1, 14 and 2, 7 and 1, 8 and 1.
PARTS = [
    ("Llama-3-8B", 2),
    ("Llama-3-8B", 4),
    ("Llama-3-70B", 4),
    ("Llama-3-70B", 8),
    ("Qwen2.5-7B", 2),
    ("Qwen2.5-7B", 4),
    ("Qwen3-30B-A3B", 4),
]


@pytest.mark.parametrize(("model", "ranks"), PARTS)
@pytest.mark.parametrize("sm", [80, 90])
def test_the_part_of_a_rank_compiles(compiler: GpuCompiler, model: str, ranks: int, sm: int) -> None:
    report = compiler.compile_steps(model, sm=sm, ranks=ranks)
    assert report.later == 0
    assert_fast(report)
