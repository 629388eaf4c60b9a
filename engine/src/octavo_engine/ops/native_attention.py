"""Paged attention by our own C++ kernel (`native/paged_attention.cpp`): one call writes K and V, one call attends.

The kernel takes ragged queries and block tables directly, for decode and prefill alike, so a step prepares only a list
of tiles. It needs fp32 or bf16, and block sizes that are whole vectors; `ops/cpu_backend.py` selects the backend.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from octavo_engine.ops.attention import AttentionBatch, AttentionSpec, LayerKVSpec
from octavo_engine.ops.cpu_cache import BlockStore
from octavo_engine.ops.cpu_groups import Lengths
from octavo_engine.ops.native_tiles import Tiles, make_tiles
from octavo_engine.ops.scratch import Scratch


class _Attention(ctypes.Structure):
    """`struct Attention` of the kernel."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "keys", "values", "tables", "tiles", "merges", "partials")),
        *((name, c_int64) for name in ("q_stride", "table_stride", "num_tiles", "num_merges")),
        *((name, c_int32) for name in ("kv_heads", "group", "head_dim", "block_size", "window", "is_bfloat16")),
        ("num_threads", c_int32),
        *((name, c_float) for name in ("scale", "softcap")),
    )


class _Write(ctypes.Structure):
    """`struct Write` of the kernel."""

    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "keys", "values", "slots")),
        *((name, c_int64) for name in ("k_stride", "v_stride", "num_tokens")),
        *((name, c_int32) for name in ("kv_heads", "head_dim", "block_size", "is_bfloat16", "num_threads")),
    )


@dataclass(slots=True)
class NativeStep:
    """Data that all layers of a step share; tiles are made once per (query heads per KV head, window)."""

    lengths: Lengths
    slots: Tensor
    tables: Tensor
    num_threads: int
    tiles: dict[tuple[int, int | None], Tiles] = field(default_factory=dict)


class NativeBackend:
    """`AttentionBackend` in C++. A sequence's results do not depend on other sequences or the number of threads."""

    def __init__(self, library: ctypes.CDLL, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> None:
        assert can_serve(library, block_size, dtype)
        self._library = library
        self._block_size = block_size
        self._lanes: int = library.octavo_lanes()
        self._tile_rows: int = library.octavo_tile_rows()
        self._chunk_keys: int = library.octavo_chunk_keys()
        self.cache = BlockStore([self._shapes(spec) for spec in specs], dtype)
        self.allocate = self.cache.allocate
        self.bytes_per_block = self.cache.bytes_per_block
        self.copy_blocks = self.cache.copy_blocks
        self.swap_out = self.cache.swap_out
        self.swap_in = self.cache.swap_in
        self._scratch = Scratch(torch.float32)

    def release(self) -> None:
        self.cache.release()
        self._scratch.release()

    def begin_step(self, batch: AttentionBatch) -> None:
        tables = batch.block_tables.to(torch.int32).contiguous()
        slots = batch.slots.to(torch.int64).contiguous()
        batch.private = NativeStep(Lengths.from_batch(batch), slots, tables, torch.get_num_threads())

    def attend(
        self,
        spec: AttentionSpec,
        q: Float[Tensor, "tokens q_heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
        batch: AttentionBatch,
    ) -> Float[Tensor, "tokens q_heads head_dim"]:
        step: NativeStep = batch.private
        q, k, v = (_rows(x, self.cache.dtype) for x in (q, k, v))
        self._write(spec, k, v, step)
        return self._attend(spec, q, step)

    def _write(self, spec: AttentionSpec, k: Tensor, v: Tensor, step: NativeStep) -> None:
        layer = spec.layer_idx
        arguments = _Write(
            k=k.data_ptr(),
            v=v.data_ptr(),
            keys=self.cache.keys[layer].data_ptr(),
            values=self.cache.values[layer].data_ptr(),
            slots=step.slots.data_ptr(),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            num_tokens=len(k),
            kv_heads=spec.kv.num_kv_heads,
            head_dim=spec.kv.head_dim,
            block_size=self._block_size,
            is_bfloat16=self.cache.dtype == torch.bfloat16,
            num_threads=step.num_threads,
        )
        self._library.octavo_write(ctypes.byref(arguments))

    def _attend(self, spec: AttentionSpec, q: Tensor, step: NativeStep) -> Tensor:
        layer, group = spec.layer_idx, spec.num_heads // spec.kv.num_kv_heads
        tiles = self._tiles(step, group, spec.kv.window)
        out = torch.zeros(q.shape, dtype=q.dtype)
        arguments = _Attention(
            q=q.data_ptr(),
            out=out.data_ptr(),
            keys=self.cache.keys[layer].data_ptr(),
            values=self.cache.values[layer].data_ptr(),
            tables=step.tables.data_ptr(),
            tiles=tiles.tiles.ctypes.data,
            merges=tiles.merges.ctypes.data,
            partials=self._partials(spec, group, tiles.num_partials).data_ptr(),
            q_stride=q.stride(0),
            table_stride=step.tables.stride(0),
            num_tiles=len(tiles.tiles),
            num_merges=len(tiles.merges),
            kv_heads=spec.kv.num_kv_heads,
            group=group,
            head_dim=spec.kv.head_dim,
            block_size=self._block_size,
            window=spec.kv.window or 0,
            is_bfloat16=q.dtype == torch.bfloat16,
            num_threads=step.num_threads,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )
        self._library.octavo_attend(ctypes.byref(arguments))
        return out

    def _tiles(self, step: NativeStep, group: int, window: int | None) -> Tiles:
        tiles = step.tiles.get((group, window))
        if tiles is None:
            tiles = step.tiles[group, window] = make_tiles(
                step.lengths, group=group, window=window, tile_rows=self._tile_rows, chunk_keys=self._chunk_keys
            )
        return tiles

    def _partials(self, spec: AttentionSpec, group: int, num_partials: int) -> Tensor:
        rows = max(self._tile_rows, group)
        width = 2 + self._padded(spec.kv.head_dim)
        return self._scratch.get_buffer("partials", num_partials, spec.kv.num_kv_heads, rows, width)

    def _shapes(self, spec: LayerKVSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        keys = (spec.num_kv_heads, spec.head_dim, self._block_size)
        return keys, (spec.num_kv_heads, self._block_size, self._padded(spec.head_dim))

    def _padded(self, head_dim: int) -> int:
        return -(-head_dim // self._lanes) * self._lanes


def can_serve(library: ctypes.CDLL, block_size: int, dtype: torch.dtype) -> bool:
    whole = block_size % library.octavo_lanes() == 0 and library.octavo_chunk_keys() % block_size == 0
    return whole and dtype in (torch.float32, torch.bfloat16)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` if each token's heads are contiguous, as in a view of a fused projection, else a contiguous copy."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
