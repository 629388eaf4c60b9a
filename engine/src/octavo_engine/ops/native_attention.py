"""Paged attention by our own C++ kernel (`native/paged_attention.cpp`): one call writes K and V, one call attends.

The kernel reads ragged queries and block tables directly, for decode and prefill alike, so a step prepares only a list
of tiles. It needs fp32 or bf16, and block sizes of `BLOCK_SIZES`; `ops/cpu_backend.py` selects the backend.

The kernel divides the keys at multiples of `PART_KEYS` and merges the partial results from left to right, so the bits
of a row depend only on its own keys. How work is divided does not affect results: a work item is a whole tile or, if
the threads would be unevenly loaded, one part of a tile's keys.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.ops.attention import AttendByParts, AttentionBatch, AttentionSpec, LayerKVSpec
from octavo_engine.ops.cpu_cache import BlockStore, Scratch
from octavo_engine.ops.cpu_length_groups import Ints, Lengths

BLOCK_SIZES = (16, 32, 64, 128)
PART_KEYS = 256  # `kPartKeys`
_UNIT = 16  # `kUnit`: dimensions of V are padded to a multiple
_MOST_PARTIAL_ROWS = 1 << 15  # most rows of divided tiles in a step: limits the memory of partial results

_TILE_FIELDS = 8  # seq, token_row, position, num_queries, key_begin, key_end, partial, unused: `struct Tile`


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work list: `tiles` [n, 8] and `merges` [m, 4] are structs of the kernel (int32); costly tiles come first."""

    tiles: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int32]
    partial_rows: int


def make_tiles(
    lengths: Lengths, *, group: int, kv_heads: int, window: int | None, tile_rows: int, threads: int
) -> Tiles:
    """Make the work list. A tile is divided if one of its KV heads takes over half of a thread's share of the work."""
    seq, row, num_queries = np.arange(len(lengths.seq)), lengths.row, lengths.query
    position = lengths.seq - num_queries
    if (num_queries != 1).any():  # else, in a decode step, each sequence is a tile
        per_tile = max(1, tile_rows // group)
        seq, number = _count_up(-(-num_queries // per_tile))
        row, position = row[seq] + number * per_tile, position[seq] + number * per_tile
        num_queries = np.minimum(per_tile, num_queries[seq] - number * per_tile)
    begin = np.zeros_like(position) if window is None else np.maximum(0, position + 1 - window)
    end = position + num_queries
    cost = num_queries * (end - begin)
    tiles = np.zeros((len(seq), _TILE_FIELDS), dtype=np.int32)
    for field, values in enumerate((seq, row, position, num_queries, begin, end, -1)):
        tiles[:, field] = values
    is_divided = (2 * threads * cost > kv_heads * cost.sum()) & (end > PART_KEYS)
    if threads > 1 and is_divided.any():
        return _divide(tiles, is_divided, group)
    return Tiles(tiles[np.argsort(-cost, kind="stable")], np.empty((0, 4), dtype=np.int32), 0)


def _divide(tiles: npt.NDArray[np.int32], is_divided: npt.NDArray[np.bool_], group: int) -> Tiles:
    """Make the work list with some tiles divided into parts, if they have several."""
    row, num_queries, begin, end = tiles[:, (1, 3, 4, 5)].astype(np.int64).T
    parts = -(-end // PART_KEYS) - begin // PART_KEYS
    rows = np.where(is_divided & (parts > 1), num_queries * group, 0)
    rows[np.cumsum(parts * rows) > _MOST_PARTIAL_ROWS] = 0
    parts[rows == 0] = 1
    tile, part = _count_up(parts)
    tiles, first_key = tiles[tile], (begin[tile] // PART_KEYS + part) * PART_KEYS
    partial = np.cumsum(rows[tile]) - rows[tile]
    tiles[:, 4] = np.maximum(begin[tile], first_key)
    tiles[:, 5] = np.where(rows[tile] > 0, np.minimum(end[tile], first_key + PART_KEYS), end[tile])
    tiles[:, 6] = np.where(rows[tile] > 0, partial, -1)
    merges = np.stack([row, num_queries, partial[np.cumsum(parts) - parts], parts], axis=1)[rows > 0]
    order = np.argsort(-(tiles[:, 3] * (tiles[:, 5] - tiles[:, 4])), kind="stable")
    return Tiles(tiles[order], merges.astype(np.int32), int((parts * rows).sum()))


def _count_up(counts: Ints) -> tuple[Ints, Ints]:
    """Return each index i repeated `counts[i]` times, and beside each its repetition number: 0 to `counts[i]` - 1."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (np.cumsum(counts) - counts)[index]


class _Layer(ctypes.Structure):
    """`struct Layer` of the kernel."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int32) for name in ("kv_heads", "group", "head_dim", "block_size", "window", "is_bfloat16")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class _Step(ctypes.Structure):
    """`struct Step` of the kernel."""

    _fields_ = (
        *((name, c_void_p) for name in ("slots", "tables", "tiles", "merges", "partials")),
        *((name, c_int64) for name in ("table_stride", "num_tiles", "num_merges")),
        ("num_threads", c_int32),
    )


@dataclass(frozen=True, slots=True)
class NativeStep:
    """Data that all layers of a step share."""

    lengths: Lengths
    slots: Tensor
    tables: Tensor


@dataclass(slots=True)
class _Work:
    """The work of layers of one shape in this step. `struct` keeps its address from step to step."""

    group: int
    kv: LayerKVSpec
    struct: _Step
    tiles: Tiles | None = None


class NativeBackend(AttendByParts):
    """`AttentionBackend` in C++. A sequence's results do not depend on other sequences or the number of threads.

    The kernels get the addresses of two structs: a layer's, which `allocate` updates, and a step's, which `begin_step`
    updates. A recorded call thus finds the current cache and step.
    """

    def __init__(self, library: ctypes.CDLL, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> None:
        assert can_serve(block_size, dtype)
        self._library = library
        self._block_size = block_size
        self._tile_rows: int = library.octavo_tile_rows()
        self.cache = BlockStore([self._shapes(spec, dtype) for spec in specs], dtype)
        self.bytes_per_block = self.cache.bytes_per_block
        self.copy_blocks = self.cache.copy_blocks
        self.swap_out = self.cache.swap_out
        self.swap_in = self.cache.swap_in
        self._scratch = Scratch(torch.float32)
        self._layers: dict[AttentionSpec, _Layer] = {}
        self._works: dict[tuple[int, LayerKVSpec], _Work] = {}
        self._step: NativeStep | None = None

    def allocate(self, num_blocks: int) -> None:
        self.cache.allocate(num_blocks)
        for spec, layer in self._layers.items():
            self._point_to_blocks(spec, layer)

    def release(self) -> None:
        self.cache.release()
        self._scratch.release()

    def begin_step(self, batch: AttentionBatch) -> None:
        assert self.cache.keys, "a plan runs while the KV cache is released"
        tables = batch.block_tables.to(torch.int32).contiguous()
        slots = batch.slots.to(torch.int64).contiguous()
        batch.private = self._step = NativeStep(Lengths.from_batch(batch), slots, tables)
        for work in self._works.values():
            self._divide(work, self._step)
        self._point_to_partials()

    def attend(
        self,
        spec: AttentionSpec,
        q: Float[Tensor, "tokens q_heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        batch: AttentionBatch,
    ) -> Float[Tensor, "tokens q_heads head_dim"]:
        assert batch.private is self._step, "begin_step was called for another batch"
        q, k, v = (_rows(x, self.cache.dtype) for x in (q, k, v))
        layer, step = (ctypes.addressof(struct) for struct in (self._layer(spec), self._work(spec).struct))
        out = torch.empty(q.shape, dtype=q.dtype)
        self._library.octavo_write(layer, step, k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), len(k))
        self._library.octavo_attend(layer, step, q.data_ptr(), q.stride(0), out.data_ptr())
        return out

    def _layer(self, spec: AttentionSpec) -> _Layer:
        layer = self._layers.get(spec)
        if layer is None:
            layer = self._layers[spec] = _Layer(
                kv_heads=spec.kv.num_kv_heads,
                group=spec.num_heads // spec.kv.num_kv_heads,
                head_dim=spec.kv.head_dim,
                block_size=self._block_size,
                window=spec.kv.window or 0,
                is_bfloat16=self.cache.dtype == torch.bfloat16,
                scale=spec.scale,
                softcap=spec.softcap or 0.0,
            )
            self._point_to_blocks(spec, layer)
        return layer

    def _point_to_blocks(self, spec: AttentionSpec, layer: _Layer) -> None:
        layer.keys = self.cache.keys[spec.layer_idx].data_ptr()
        layer.values = self.cache.values[spec.layer_idx].data_ptr()

    def _work(self, spec: AttentionSpec) -> _Work:
        key = (spec.num_heads // spec.kv.num_kv_heads, spec.kv)
        work = self._works.get(key)
        if work is None:
            assert self._step is not None
            work = self._works[key] = _Work(*key, _Step())
            self._divide(work, self._step)
            self._point_to_partials()
        return work

    def _divide(self, work: _Work, step: NativeStep) -> None:
        """Make the tiles of the step and write all addresses, except that of the partial results."""
        tiles = work.tiles = make_tiles(
            step.lengths,
            group=work.group,
            kv_heads=work.kv.num_kv_heads,
            window=work.kv.window,
            tile_rows=self._tile_rows,
            threads=torch.get_num_threads(),
        )
        struct = work.struct
        struct.slots, struct.tables = step.slots.data_ptr(), step.tables.data_ptr()
        struct.tiles, struct.merges = tiles.tiles.ctypes.data, tiles.merges.ctypes.data
        struct.table_stride = step.tables.stride(0)
        struct.num_tiles, struct.num_merges = len(tiles.tiles), len(tiles.merges)
        struct.num_threads = torch.get_num_threads()

    def _point_to_partials(self) -> None:
        """Layers use one buffer in turn; if it grows, it moves."""
        size = max(map(self._partial_size, self._works.values()), default=0)
        if size > 0:
            address = self._scratch.get_buffer("partials", size).data_ptr()
            for work in self._works.values():
                work.struct.partials = address

    def _partial_size(self, work: _Work) -> int:
        assert work.tiles is not None
        return work.tiles.partial_rows * work.kv.num_kv_heads * (2 + _round_up(work.kv.head_dim, _UNIT))

    def _shapes(self, spec: LayerKVSpec, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of a block, within which the kernel orders pairs of bf16."""
        key_dim = _round_up(spec.head_dim, 2 if dtype == torch.bfloat16 else 1)
        keys = (spec.num_kv_heads, key_dim, self._block_size)
        return keys, (spec.num_kv_heads, self._block_size, _round_up(spec.head_dim, _UNIT))


def can_serve(block_size: int, dtype: torch.dtype) -> bool:
    return block_size in BLOCK_SIZES and dtype in (torch.float32, torch.bfloat16)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` if each token's heads are contiguous, as in a view of a fused projection, else a contiguous copy."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
