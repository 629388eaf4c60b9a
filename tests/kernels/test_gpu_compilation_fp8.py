"""The FP8 kernels compile for sm_89 and sm_90: products of FP8 tensor cores, without spills."""

from collections.abc import Iterator

import pytest
from octavo_engine.ops.triton.fp8_linear import TILES
from octavo_testing.gpu_compiler import MAX_SHARED_BYTES, GpuCompiler

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler() -> Iterator[GpuCompiler]:
    with GpuCompiler.start() as started:
        yield started


#: Outputs, inputs and groups of weights: of Llama 3, DeepSeek and Qwen 2.5, and one that no tile divides.
SHAPES = [(6144, 4096, 1), (7168, 2048, 16), (896, 4864, 38), (1000, 1040, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sm", [89, 90])
def test_products_are_of_fp8_tensor_cores(compiler: GpuCompiler, sm: int, shape: tuple[int, int, int]) -> None:
    report = compiler.compile_fp8(*shape, sm=sm, dtype="bfloat16")
    assert report.later == 0, "numbers of rows compile no kernel again"
    products = [kernel for kernel in report.kernels if kernel.name == "fp8_linear_kernel"]
    roundings = [kernel for kernel in report.kernels if kernel.name == "round_rows_kernel"]
    assert (len(products), len(roundings)) == (2 * len(TILES), 1)
    for kernel in report.kernels:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared_bytes <= MAX_SHARED_BYTES[89], kernel
    for kernel in products:
        assert kernel.fp8_products == kernel.products > 0, kernel
        assert kernel.group_products == (kernel.products if sm == 90 else 0), kernel
        assert kernel.copies_16 >= 8, kernel
