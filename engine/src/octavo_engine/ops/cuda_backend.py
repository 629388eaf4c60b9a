"""The attention backend for accelerators: one cache tensor per layer, and Triton kernels that write and read it.

The device is any that torch names: CUDA, `meta` to compile without a device, and the CPU in Triton's interpreter.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from octavo_engine.ops.attention import AttentionBatch, AttentionSpec, LayerKVSpec
from octavo_engine.ops.norm import RMSWeight
from octavo_engine.ops.rope import Rotation
from octavo_engine.ops.triton.decode_attention import Processor, decode_attention, list_parts
from octavo_engine.ops.triton.paged_attention import paged_attention
from octavo_engine.ops.triton.write_kv import write_kv
from octavo_engine.ops.triton.write_qkv import write_qkv
from octavo_engine.wire.errors import StartupError

_CHUNK_BLOCKS = 256  # blocks copied at a time, which bounds the temporary copies of a layer
_STAGING_BYTES = 64 << 20  # of blocks that are swapped at a time


class CudaBackend:
    """KV caches of [blocks, 2, kv_heads, block_size, head_dim], one per layer; FP8 (e4m3) caches have dtype uint8.

    `num_programs`: programs that share a step's decode attention; on a GPU one per multiprocessor. `processor`: the
    shared memory, threads and registers of a multiprocessor, which limit how many programs of a kernel it runs at a
    time. `has_wgmma`: the GPU has warp-group MMA instructions (sm_90). `has_e4m3`: the GPU has instructions that
    convert e4m3 (since sm_89). `copy`: copies block numbers to the device; by default from pageable memory.
    """

    def __init__(
        self,
        specs: list[LayerKVSpec],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        num_programs: int,
        processor: Processor | None = None,
        has_wgmma: bool = False,
        has_e4m3: bool = False,
        copy: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._copy = copy or (lambda numbers: numbers.to(self.device))
        self.num_programs, self._processor = num_programs, processor
        self._has_wgmma, self._has_e4m3 = has_wgmma, has_e4m3
        self._programs: dict[object, int] = {}  # that run at a time on a processor, by kernel constants
        self.dtype, self.device = dtype, torch.device(device)
        self.caches: list[Tensor] = []
        self._stored = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        self._scales = [(spec.k_scale, spec.v_scale) for spec in specs]
        self._windows = {spec.window for spec in specs}
        self._shapes = [(2, spec.num_kv_heads, block_size, spec.head_dim) for spec in specs]

    def allocate(self, num_blocks: int) -> None:
        self.caches = [
            torch.zeros((num_blocks, *shape), dtype=self._stored, device=self.device) for shape in self._shapes
        ]

    def release(self) -> None:
        self.caches = []

    def bytes_per_block(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes) * self.dtype.itemsize

    def begin_step(self, batch: AttentionBatch) -> None:
        batch.private = {window: list_parts(batch, window) for window in self._windows}

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        q, k, v = (_with_adjacent_heads(x) for x in (q, k, v))
        write_kv(self.caches[spec.layer_idx], k, v, batch.slots, self._scales[spec.layer_idx])
        return self._attend(spec, q, batch)

    def attend_qkv(
        self,
        spec: AttentionSpec,
        qk: Tensor,
        v: Tensor,
        norm: RMSWeight | None,
        rotation: Rotation | None,
        batch: AttentionBatch,
    ) -> Tensor:
        cache, scales = self.caches[spec.layer_idx], self._scales[spec.layer_idx]
        return self._attend(spec, write_qkv(cache, qk, v, batch.slots, norm, rotation, scales), batch)

    def _attend(self, spec: AttentionSpec, q: Tensor, batch: AttentionBatch) -> Tensor:
        cache, shape = self.caches[spec.layer_idx], (spec.num_heads, spec.kv, spec.softcap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        codes: dict[str, Any] = {"scales": self._scales[spec.layer_idx], "has_e4m3": self._has_e4m3}
        try:
            if batch.max_query_len > 1:
                paged_attention(out, spec, q, cache, batch, has_wgmma=self._has_wgmma, **codes)
            num_programs = self.num_programs * self._programs.get(shape, 1)
            kernel = decode_attention(out, spec, q, cache, batch, batch.private[spec.kv.window], num_programs, **codes)
        except OutOfResources as error:  # the first steps, before the engine is ready, compile all kernels
            group, dtype = spec.num_heads // spec.kv.num_kv_heads, str(q.dtype).removeprefix("torch.")
            raise StartupError(
                f"attention of {group} query heads of size {spec.kv.head_dim} for each KV head, in {dtype}, exceeds "
                f"the GPU's {error.name}: it needs {error.required}, the limit is {error.limit}. Remedy: --device cpu, "
                "a narrower --dtype, or a model with smaller heads."
            ) from error
        if self._processor is not None and shape not in self._programs:
            size = kernel.metadata
            self._programs[shape] = self._processor.num_programs(kernel.n_regs, size.shared, size.num_warps)
        return out

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for chunk in _chunks(pairs, _CHUNK_BLOCKS):
            source, destination = self._copy(chunk.T.contiguous())
            for cache in self.caches:
                cache.index_copy_(0, destination, cache.index_select(0, source))

    def swap_out(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        """Start to copy blocks to rows of `host`, which are complete once the device has finished."""
        for chunk, staging in self._staged(pairs):
            blocks = self._copy(chunk[:, 0].contiguous())
            for columns, cache in self._columns(staging):
                columns.copy_(cache.index_select(0, blocks))
            for row, values in zip(chunk[:, 1].tolist(), staging, strict=True):
                host[row].copy_(values, non_blocking=True)

    def swap_in(self, pairs: list[tuple[int, int]], host: Tensor) -> None:
        """Start to copy rows of `host` to blocks; the rows may change once the device has finished."""
        for chunk, staging in self._staged(pairs):
            for row, values in zip(chunk[:, 0].tolist(), staging, strict=True):
                values.copy_(host[row], non_blocking=True)
            blocks = self._copy(chunk[:, 1].contiguous())
            for columns, cache in self._columns(staging):
                cache.index_copy_(0, blocks, columns)

    def _staged(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs [n, 2] and memory of the device [n, bytes per block] for their blocks."""
        size = self.bytes_per_block()
        for chunk in _chunks(pairs, max(1, _STAGING_BYTES // size)):
            yield chunk, torch.empty((len(chunk), size), dtype=torch.uint8, device=self.device)

    def _columns(self, staging: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair each cache, as rows of bytes, with the columns of `staging` that hold its part of a block."""
        offset = 0
        for cache in self.caches:
            raw = cache.view(len(cache), -1).view(torch.uint8)
            yield staging[:, offset : offset + raw.shape[1]], raw
            offset += raw.shape[1]


def _with_adjacent_heads(x: Tensor) -> Tensor:
    """Return rows [tokens, heads, head_dim] as the kernels read them, copied if their heads lie apart in memory."""
    if x.stride()[1:] == (x.shape[2], 1):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps any stride of a single head


def _chunks(pairs: list[tuple[int, int]], size: int) -> tuple[Tensor, ...]:
    return torch.split(torch.tensor(pairs, dtype=torch.int64).view(-1, 2), size)
