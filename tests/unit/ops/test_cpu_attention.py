"""Both CPU attention backends against the reference, over ragged mixes of prefill and decode."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from octavo_engine.ops.attention import AttentionBackend, AttentionSpec, LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.cpu_length_groups import Lengths
from octavo_engine.ops.native_attention import NativeBackend, Tiles, can_serve, make_tiles
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.reference import ReferenceBackend
from octavo_testing.attention_cases import SeqShape, make_batch, make_spec, random_qkv, run_history_and_step
from torch import Tensor

MIXES = {
    "decode": [SeqShape(n, 1) for n in (1, 15, 16, 17, 31, 32, 100, 257)],
    "prefill": [SeqShape(0, n) for n in (2, 15, 16, 17, 33, 70)],
    "chunks": [SeqShape(16, 16), SeqShape(5, 30), SeqShape(64, 3), SeqShape(47, 1), SeqShape(31, 2)],
    "mixed": [SeqShape(0, 40), SeqShape(90, 1), SeqShape(0, 1), SeqShape(33, 20), SeqShape(15, 1), SeqShape(0, 41)],
    "one": [SeqShape(0, 1)],
    "long": [SeqShape(700, 1), SeqShape(600, 60), SeqShape(511, 2), SeqShape(0, 300), SeqShape(255, 2)],
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


MakeBackend = Callable[[list[LayerKVSpec], int, torch.dtype], AttentionBackend]


@pytest.fixture(params=["torch", "native"])
def make(request: pytest.FixtureRequest) -> MakeBackend:
    if request.param == "torch":
        return CpuBackend
    library = native_library()
    assert library is not None, "these tests need g++"

    def native(specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        if not can_serve(block_size, dtype):
            pytest.skip("blocks that aren't whole vectors are left to torch")
        return NativeBackend(library, specs, block_size, dtype)

    return native


def compare(
    make: MakeBackend,
    spec: AttentionSpec,
    shapes: list[SeqShape],
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
) -> Tensor:
    want = run_history_and_step(ReferenceBackend([spec.kv], block_size, dtype), spec, shapes, block_size, dtype)
    got = run_history_and_step(make([spec.kv], block_size, dtype), spec, shapes, block_size, dtype)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return got


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 1, 16, 24], ids=lambda w: f"window-{w}")
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_attention_equals_the_reference(
    make: MakeBackend, mix: str, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    compare(make, make_spec(window=window, softcap=softcap), MIXES[mix], dtype=dtype)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (9, 3), (8, 1), (16, 2)], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_shape_equals_the_reference(make: MakeBackend, heads: tuple[int, int], dim: int) -> None:
    compare(make, make_spec(heads=heads[0], kv_heads=heads[1], dim=dim), MIXES["mixed"])


@pytest.mark.parametrize(("heads", "dim"), [(72, 576), (40, 288)])  # 72: more than the rows of a tile
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_latents_equal_the_reference(make: MakeBackend, heads: int, dim: int, dtype: torch.dtype) -> None:
    compare(make, make_spec(heads=heads, kv_heads=1, dim=dim), [SeqShape(0, 7), SeqShape(260, 1)], dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
def test_every_block_size_equals_the_reference(make: MakeBackend, block_size: int) -> None:
    compare(make, make_spec(), MIXES["mixed"] + MIXES["decode"], block_size=block_size)


def test_a_token_without_a_slot_is_not_written(make: MakeBackend) -> None:
    """A fully cached prompt recomputes its last token, whose KV is already in a shared block."""
    spec, shapes = make_spec(), [SeqShape(20, 1), SeqShape(3, 2)]
    outputs = []
    for backend in (ReferenceBackend([spec.kv], 16, torch.float32), make([spec.kv], 16, torch.float32)):
        run_history_and_step(backend, spec, shapes, 16, torch.float32)
        batch, _ = make_batch(shapes, 16)
        batch.slots[0] = -1
        backend.begin_step(batch)
        outputs.append(backend.attend(spec, *random_qkv(spec, 3, torch.float32, seed=7), batch))
    torch.testing.assert_close(outputs[1], outputs[0])


def test_blocks_written_in_this_step_are_read_by_another_sequence(make: MakeBackend) -> None:
    """Two requests of one step share a prefix block that the first of them writes."""
    spec, outputs = make_spec(), []
    for backend in (ReferenceBackend([spec.kv], 16, torch.float32), make([spec.kv], 16, torch.float32)):
        batch, num_blocks = make_batch([SeqShape(0, 20), SeqShape(16, 5)], 16)
        batch.block_tables[1, 0] = batch.block_tables[0, 0]
        backend.allocate(num_blocks)
        backend.begin_step(batch)
        outputs.append(backend.attend(spec, *random_qkv(spec, 25, torch.float32, seed=7), batch))
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_stale_contents_of_a_block_are_never_read(make: MakeBackend, softcap: float | None) -> None:
    spec = make_spec(softcap=softcap)
    shapes = [SeqShape(16, 1), SeqShape(0, 5), SeqShape(30, 3)]
    clean = make([spec.kv], 16, torch.float32)
    want = run_history_and_step(clean, spec, shapes, 16, torch.float32)

    dirty = make([spec.kv], 16, torch.float32)
    _, num_blocks = make_batch(shapes, 16)
    dirty.allocate(num_blocks)
    payload = torch.full((num_blocks, dirty.bytes_per_block()), 0xFF, dtype=torch.uint8)  # NaN
    dirty.swap_in([(i, i) for i in range(num_blocks)], payload)
    dirty.allocate = lambda num_blocks: None  # type: ignore[method-assign]
    got = run_history_and_step(dirty, spec, shapes, 16, torch.float32)
    torch.testing.assert_close(got, want)


def test_a_sequence_gets_the_same_result_alone_and_in_a_batch(make: MakeBackend) -> None:
    """The native kernel gives the same bits for any other sequences, number of threads and order."""
    spec = make_spec(heads=9, kv_heads=3)
    crowd = [SeqShape(n, 1) for n in range(20, 84)] + [SeqShape(0, 50), SeqShape(900, 1)]
    together = compare(make, spec, crowd)
    backend = make([spec.kv], 16, torch.float32)
    run_history_and_step(backend, spec, crowd[:1], 16, torch.float32)
    qkv = random_qkv(spec, len(together), torch.float32, seed=0)
    first = [x[:1] for x in qkv]
    batch, _ = make_batch(crowd[:1], 16)
    backend.begin_step(batch)
    alone = backend.attend(spec, *first, batch)
    torch.testing.assert_close(alone, together[:1])
    if isinstance(backend, NativeBackend):
        assert torch.equal(alone, together[:1])


def test_large_groups_are_split_so_that_scratch_stays_bounded() -> None:
    spec = make_spec(heads=2, kv_heads=2, dim=64)
    backend = CpuBackend([spec.kv], 16, torch.float32)
    backend._max_keys = 64  # at most two of the sequences below per group
    shapes = [SeqShape(31, 1)] * 9
    got = run_history_and_step(backend, spec, shapes, 16, torch.float32)
    want = run_history_and_step(ReferenceBackend([spec.kv], 16, torch.float32), spec, shapes, 16, torch.float32)
    torch.testing.assert_close(got, want)
    batch, _ = make_batch(shapes, 16)
    backend.begin_step(batch)
    assert [len(g.queries) for g in batch.private.groups[None]] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("shapes", [MIXES["mixed"], MIXES["long"], [SeqShape(1200, 1)], [SeqShape(900, 40)]], ids=str)
def test_the_number_of_threads_changes_nothing(make: MakeBackend, shapes: list[SeqShape]) -> None:
    spec = make_spec(heads=9, kv_heads=3, window=600)
    torch.set_num_threads(1)
    alone = compare(make, spec, shapes)
    torch.set_num_threads(2)
    together = compare(make, spec, shapes)
    torch.testing.assert_close(together, alone)
    if native_library() is not None and make is not CpuBackend:
        assert torch.equal(together, alone)


def tiles_of(*shapes: SeqShape, threads: int, window: int | None = None) -> Tiles:
    lengths = Lengths.from_batch(make_batch([*shapes], 16)[0])
    return make_tiles(lengths, group=3, kv_heads=3, window=window, tile_rows=64, threads=threads)


def test_keys_are_divided_only_if_threads_would_wait() -> None:
    long, short = SeqShape(5000, 1), SeqShape(300, 1)
    assert len(tiles_of(long, threads=1).merges) == 0
    assert len(tiles_of(*[long] * 16, threads=2).merges) == 0
    assert tiles_of(*[short] * 8, long, threads=4).merges.tolist() == [[8, 1, 0, 20]]


@given(
    computed=st.lists(st.sampled_from((0, 7, 255, 256, 300, 5000)), min_size=1, max_size=9),
    window=st.sampled_from((None, 5, 300)),
    threads=st.sampled_from((1, 4, 64)),
)
def test_the_tiles_of_a_decode_step_do_not_depend_on_how_they_are_made(
    computed: list[int], window: int | None, threads: int
) -> None:
    """A sequence without a query makes a step no decode step, and adds no tile."""
    shapes = [SeqShape(length, 1) for length in computed]
    decoding = tiles_of(*shapes, window=window, threads=threads)
    other = tiles_of(*shapes, SeqShape(400, 0), window=window, threads=threads)
    assert decoding.tiles.tolist() == other.tiles.tolist()
    assert decoding.merges.tolist() == other.merges.tolist()
    assert decoding.partial_rows == other.partial_rows


def test_the_memory_of_partial_results_is_bounded() -> None:
    tiles = tiles_of(SeqShape(60_000, 2000), SeqShape(100_000, 60), threads=128)
    assert 0 < tiles.partial_rows <= 1 << 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 300], ids=lambda w: f"window-{w}")
def test_the_last_tokens_of_a_cached_prompt_have_the_bits_of_the_whole_prompt(
    make: MakeBackend, dtype: torch.dtype, window: int | None
) -> None:
    """A prefix hit, a chunk and a decode step change no answer: a row's bits depend on its own keys only."""
    spec = make_spec(heads=9, kv_heads=3, window=window)
    backend = make([spec.kv], 16, dtype)
    if not isinstance(backend, NativeBackend):
        pytest.skip("torch makes no promise of equal bits")
    qkv = random_qkv(spec, 400, dtype, seed=0)
    batch, num_blocks = make_batch([SeqShape(0, 400)], 16)
    backend.allocate(num_blocks)
    backend.begin_step(batch)
    whole = backend.attend(spec, *qkv, batch)
    differ = []
    for queries in (100, 64, 34, 33, 16, 1):
        batch, _ = make_batch([SeqShape(400 - queries, queries)], 16)
        backend.begin_step(batch)
        if not torch.equal(backend.attend(spec, *(x[-queries:] for x in qkv), batch), whole[-queries:]):
            differ.append(queries)
    assert differ == []
