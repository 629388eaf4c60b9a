"""Products with weights in groups compile for sm_80 and sm_90, and spend few instructions on a weight."""

from collections.abc import Iterator

import pytest
from octavo_engine.ops.triton.group_linear import TILES
from octavo_testing.gpu_compiler import MAX_SHARED_BYTES, GpuCompiler

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler() -> Iterator[GpuCompiler]:
    with GpuCompiler.start() as started:
        yield started


#: Kind, inputs of a group, type of the rows, type of the scales, and the most instructions a weight. Scales of another
#: type than the rows' make the multiplication one of fp32.
CASES = [
    ("int4", 128, "bfloat16", "bfloat16", 6.5),
    ("int4 with zeros", 128, "float16", "float16", 7),  # 6.9 on sm_80, 5.7 on sm_90
    ("int4 with zeros", 128, "bfloat16", "float16", 10),
    ("int4", 32, "bfloat16", "float16", 10),
    ("int8", 1024, "bfloat16", "bfloat16", 10),
    ("e4m3", 128, "bfloat16", "float32", 10),
    ("table4", 64, "bfloat16", "float32", 10),
]


@pytest.mark.parametrize(("kind", "group", "dtype", "scale_dtype", "most"), CASES)
@pytest.mark.parametrize("sm", [80, 90])
def test_a_product_compiles(
    compiler: GpuCompiler, sm: int, kind: str, group: int, dtype: str, scale_dtype: str, most: float
) -> None:
    report = compiler.compile_groups(kind, group, sm=sm, dtype=dtype, scale_dtype=scale_dtype)
    assert report.later == 0
    assert not any(kernel.spill_bytes for kernel in report.kernels), report.kernels
    products = [kernel for kernel in report.kernels if kernel.name == "group_linear_kernel"]
    for tile, kernel in zip(TILES, products, strict=True):
        depth = 64 if kind == "table4" and tile.rows > 16 else 128
        per_weight = kernel.longest_loop * kernel.num_warps * 32 / (tile.columns * depth)
        assert kernel.shared_bytes <= MAX_SHARED_BYTES[80], kernel
        assert kernel.copies_16 >= 4, kernel
        assert kernel.products, kernel
        assert bool(kernel.group_products) == (sm == 90), kernel
        if tile.rows == 16:
            assert per_weight <= most, kernel
