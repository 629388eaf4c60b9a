"""Attention of several queries at once equals that of each alone, bit for bit: tokens do not depend on drafts."""

import pytest
import torch
from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.cpu_level import Level
from octavo_engine.ops.native_attention import NativeBackend
from octavo_engine.ops.native_library import load_library
from octavo_testing.attention_cases import make_spec, random_qkv
from octavo_testing.kernel_levels import levels_to_test
from torch import Tensor

pytestmark = pytest.mark.slow

BLOCK = 16
MOST_QUERIES = 12
CONTEXTS = (1, 5, 16, 100, 127, 250, 255, 256, 300, 505, 588)
SAME_VECTORS = ("amx", "avx512vnni", "emulated-avx2")  # as other levels
LEVELS = {level.name: level for level in levels_to_test() if level.name not in SAME_VECTORS}


def step(start: int, queries: int, blocks: Tensor) -> AttentionBatch:
    positions = torch.arange(start, start + queries)
    return AttentionBatch(
        query_start=torch.tensor([0, queries], dtype=torch.int32),
        seq_lens=torch.tensor([start + queries], dtype=torch.int32),
        block_tables=blocks[None].to(torch.int32),
        slots=blocks[positions // BLOCK] * BLOCK + positions % BLOCK,
        max_query_len=queries,
        max_seq_len=start + queries,
        num_keys=start + queries,
    )


def assert_rows_are_equal(backend: NativeBackend, spec: AttentionSpec, dtype: torch.dtype, start: int) -> None:
    blocks = torch.randperm(-(-(start + MOST_QUERIES) // BLOCK), generator=torch.Generator().manual_seed(start))
    qkv = random_qkv(spec, start + MOST_QUERIES, dtype, seed=start)

    def attend(begin: int, queries: int) -> Tensor:
        batch = step(begin, queries, blocks)
        backend.begin_step(batch)
        return backend.attend(spec, *(x[begin : begin + queries] for x in qkv), batch)

    if start:
        attend(0, start)
    alone = torch.cat([attend(start + i, 1) for i in range(MOST_QUERIES)])
    for queries in range(1, MOST_QUERIES + 1):
        assert torch.equal(attend(start, queries), alone[:queries]), f"{queries} queries after {start} keys differ"


@pytest.mark.parametrize("level", LEVELS.values(), ids=[*LEVELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 1, 48, 300], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("group", [1, 3, 4, 8], ids=lambda g: f"group-{g}")
def test_queries_at_once_equal_queries_alone(level: Level, dtype: torch.dtype, window: int | None, group: int) -> None:
    spec = make_spec(heads=2 * group, kv_heads=2, window=window)
    library = load_library("g++", level)
    backend = NativeBackend(library, [spec.kv], BLOCK, dtype)
    backend.allocate(-(-(max(CONTEXTS) + MOST_QUERIES) // BLOCK))
    for start in CONTEXTS:
        assert_rows_are_equal(backend, spec, dtype, start)
