"""All architectures, and parts of ranks, compile for sm_80 and sm_90: without spills, and nothing compiles later."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from octavo_engine.models.registry import ARCHITECTURES
from octavo_engine.ops.triton.decode_attention import Processor
from octavo_engine.ops.triton.paged_attention import tile_shape
from octavo_testing.attention_cases import make_spec
from octavo_testing.gpu_compiler import MAX_SHARED_BYTES, MODELS, GpuCompiler, assert_fast

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler() -> Iterator[GpuCompiler]:
    with GpuCompiler.start() as started:
        yield started


def test_every_architecture_is_compiled() -> None:
    assert MODELS.keys() == ARCHITECTURES.keys()


HEAD_SIZES = ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM")  # 128, 64 and 256
WIDE = (*HEAD_SIZES, "Qwen3MoeForCausalLM")
CASES = [*((model, "bfloat16") for model in MODELS), *((model, "float32") for model in WIDE)]


@pytest.mark.parametrize(("model", "dtype"), CASES)
@pytest.mark.parametrize("sm", [80, 90])
def test_a_model_compiles(compiler: GpuCompiler, model: str, sm: int, dtype: str) -> None:
    report = compiler.compile_steps(model, sm=sm, dtype=dtype)
    assert report.later == 0
    has_experts = any(name in model for name in ("Moe", "Mixtral", "Olmoe"))
    most = 7 + 16 if has_experts else 12 if "Gemma" in model else 10
    assert all(len(launches) <= most for launches in report.layer_launches)
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


PROCESSORS = {80: Processor(164 << 10, 2048), 89: Processor(100 << 10, 1536), 90: Processor(228 << 10, 2048)}
#: Query heads, KV heads and head size, and how many programs of decode attention a processor of each holds.
SHAPES = {
    (16, 8, 128): {80: 3, 89: 2, 90: 4},
    (28, 4, 128): {80: 3, 89: 2, 90: 4},
    (64, 8, 128): {80: 3, 89: 2, 90: 4},
    (8, 4, 256): {80: 2, 89: 2, 90: 2},
    (4, 1, 256): {80: 2, 89: 2, 90: 2},
    (64, 8, 64): {80: 5, 89: 4, 90: 5},
    (32, 32, 64): {80: 5, 89: 4, 90: 5},
    (32, 32, 96): {80: 3, 89: 2, 90: 3},
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sm", PROCESSORS)
def test_attention_of_a_head_shape_compiles(
    compiler: GpuCompiler, shape: tuple[int, int, int], sm: int, dtype: str
) -> None:
    report = compiler.compile_attention(*shape, sm=sm, dtype=dtype)
    decode = next(kernel for kernel in report.kernels if kernel.name == "decode_parts_kernel")
    if (sm, shape[2], dtype) == (89, 96, "bfloat16"):  # the tile of prompts, chosen for sm_80, spills 24 bytes
        report = replace(report, kernels=[decode])
    assert_fast(report, tensor_cores=dtype == "bfloat16")
    programs = PROCESSORS[sm].num_programs(decode.registers, decode.shared_bytes, decode.num_warps)
    assert programs >= SHAPES[shape][sm] or dtype == "float32"


@pytest.mark.parametrize("heads", [(128, 576), (20, 576), (40, 288)], ids=str)
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("sm", PROCESSORS)
def test_attention_over_latents_compiles(compiler: GpuCompiler, heads: tuple[int, int], sm: int, cache: str) -> None:
    """All query heads of DeepSeek, GLM-4-MoE-Lite and MiniCPM3 share one KV head; programs divide them."""
    report = compiler.compile_attention(heads[0], 1, heads[1], sm=sm, dtype="bfloat16", cache=cache)
    for kernel in report.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= MAX_SHARED_BYTES[80], kernel
        assert bool(kernel.products) == (kernel.name in ("paged_attention_kernel", "decode_parts_kernel")), kernel


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_have_tiles_of_128_rows_on_hopper(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, head_dim = shape
    tile = tile_shape(make_spec(heads=heads, kv_heads=kv_heads, dim=head_dim), torch.bfloat16, has_wgmma=True)
    assert (tile.queries * tile.group_rows, tile.num_warps) == (128, 8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sm", PROCESSORS)
def test_attention_over_an_fp8_cache_compiles(compiler: GpuCompiler, shape: tuple[int, int, int], sm: int) -> None:
    """GPUs with instructions for e4m3 convert it by them, others by shifts."""
    report = compiler.compile_attention(*shape, sm=sm, dtype="bfloat16", cache="float8_e4m3fn")
    kernels = {kernel.name: kernel for kernel in report.kernels}
    for kernel in report.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= MAX_SHARED_BYTES[sm], kernel
    for name in ("decode_parts_kernel", "paged_attention_kernel"):
        assert kernels[name].products, name
        assert bool(kernels[name].e4m3_conversions) == (sm >= 89), name
    assert bool(kernels["paged_attention_kernel"].group_products) == (sm == 90)
    assert {"write_kv_kernel", "write_qkv_kernel"} < kernels.keys()
