"""Ragged steps for attention tests: random sequences over shuffled blocks, with the KV of earlier tokens written."""

from dataclasses import dataclass, replace

import torch
from octavo_engine.ops.attention import AttentionBackend, AttentionBatch, AttentionSpec, LayerKVSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.reference import ReferenceBackend
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class SeqShape:
    """Lengths of one sequence: `computed` tokens have KV already, and `query` tokens are computed in this step."""

    computed: int
    query: int


def make_batch(shapes: list[SeqShape], block_size: int, *, seed: int = 0) -> tuple[AttentionBatch, int]:
    """Return a batch over shuffled block ids, and the number of blocks that it needs."""
    lens = [s.computed + s.query for s in shapes]
    counts = [-(-n // block_size) for n in lens]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.full((len(shapes), max(counts) + 1), -1, dtype=torch.int32)
    slots: list[int] = []
    for i, shape in enumerate(shapes):
        table, ids = ids[: counts[i]], ids[counts[i] :]
        tables[i, : counts[i]] = torch.tensor(table, dtype=torch.int32)
        for position in range(shape.computed, lens[i]):
            slots.append(table[position // block_size] * block_size + position % block_size)
    starts = torch.tensor([0, *[s.query for s in shapes]]).cumsum(0).to(torch.int32)
    batch = AttentionBatch(
        query_start=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables,
        slots=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max(s.query for s in shapes),
        max_seq_len=max(lens),
        num_keys=sum(lens),
    )
    return batch, sum(counts)


def on_device(batch: AttentionBatch, device: str) -> AttentionBatch:
    names = ("query_start", "seq_lens", "block_tables", "slots")
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})


def part_of(batch: AttentionBatch, seqs: list[int], padding: int = 0) -> tuple[AttentionBatch, Tensor]:
    """Return the step of some of the sequences and the places of their tokens; `padding`: rows without a slot behind.

    Such rows fill a batch up to the size of a recorded step.
    """
    counts = batch.query_start.diff()[seqs]
    starts = F.pad(torch.cat([counts, counts.new_ones(padding)]).cumsum(0), (1, 0)).to(torch.int32)
    places = torch.cat([torch.arange(*batch.query_start[seq : seq + 2].tolist()) for seq in seqs])
    part = AttentionBatch(
        query_start=starts,
        seq_lens=F.pad(batch.seq_lens[seqs], (0, padding)),
        block_tables=F.pad(batch.block_tables[seqs], (0, 0, 0, padding)),
        slots=F.pad(batch.slots[places], (0, padding), value=-1),
        max_query_len=int(counts.max()),
        max_seq_len=int(batch.seq_lens[seqs].max()),
        num_keys=int(batch.seq_lens[seqs].sum()),
    )
    return part, places


def in_reference_layout(cache: Tensor) -> Tensor:
    """Return a cache of the Triton kernels as the reference backend has it, in fp32."""
    values = cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache
    return values.float().permute(1, 0, 3, 2, 4).contiguous()


def e4m3_codes(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return the codes of an FP8 cache, which are nearest to `x / scale`; beyond 448 the largest one."""
    return (x.float() * (1.0 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)


class E4M3Reference(ReferenceBackend):
    """Rounds keys and values as an FP8 cache does, and attends to them in fp32."""

    def __init__(self, specs: list[LayerKVSpec], block_size: int, device: torch.device | str = "cpu") -> None:
        super().__init__(specs, block_size, torch.float32, device)

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        own = self.specs[spec.layer_idx]
        k, v = (e4m3_codes(x, scale).float() * scale for x, scale in ((k, own.k_scale), (v, own.v_scale)))
        return super().attend(spec, q.float(), k, v, batch).to(q.dtype)


def random_qkv(spec: AttentionSpec, tokens: int, dtype: torch.dtype, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make Q, K and V as a model does: views into one fused projection, so that their rows are strided."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv, dim = spec.num_heads, spec.kv.num_kv_heads, spec.kv.head_dim
    fused = torch.randn(tokens, (heads + 2 * kv) * dim, generator=generator).to(dtype)
    q, k, v = fused.split([heads * dim, kv * dim, kv * dim], dim=1)
    return q.view(tokens, heads, dim) * 2, k.view(tokens, kv, dim), v.view(tokens, kv, dim)


def run_history_and_step(
    backend: AttentionBackend,
    spec: AttentionSpec,
    shapes: list[SeqShape],
    block_size: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
) -> Tensor:
    """Write the earlier KV of each sequence by one prefill, then run the step of `shapes`.

    Nothing reads the output of the prefill. A cache of the Triton kernels is filled by torch, as the interpreter needs
    seconds for it; the step itself writes by the kernel.
    """
    batch, num_blocks = make_batch(shapes, block_size, seed=seed)
    backend.allocate(num_blocks)
    for i, shape in enumerate(shapes):
        if shape.computed:
            history = history_batch(batch, i, shape.computed, block_size)
            q, k, v = random_qkv(spec, shape.computed, dtype, seed=1000 + i)
            if isinstance(backend, CudaBackend):
                blocks, places = history.slots // block_size, history.slots % block_size
                cache = backend.caches[spec.layer_idx]
                if cache.dtype == torch.uint8:
                    scales = spec.kv.k_scale, spec.kv.v_scale
                    k, v = (e4m3_codes(*each).view(torch.uint8) for each in zip((k, v), scales, strict=True))
                cache[blocks, 0, :, places], cache[blocks, 1, :, places] = k, v
                continue
            backend.begin_step(history)
            backend.attend(spec, q, k, v, history)
    backend.begin_step(batch)
    return backend.attend(spec, *random_qkv(spec, len(batch.slots), dtype, seed=seed), batch)


def history_batch(batch: AttentionBatch, seq: int, computed: int, block_size: int) -> AttentionBatch:
    position = torch.arange(computed)
    table = batch.block_tables[seq : seq + 1]
    return AttentionBatch(
        query_start=torch.tensor([0, computed], dtype=torch.int32),
        seq_lens=torch.tensor([computed], dtype=torch.int32),
        block_tables=table,
        slots=table[0, position // block_size].long() * block_size + position % block_size,
        max_query_len=computed,
        max_seq_len=computed,
        num_keys=computed,
    )


def make_spec(
    *, heads: int = 4, kv_heads: int = 2, dim: int = 64, window: int | None = None, softcap: float | None = None
) -> AttentionSpec:
    kv = LayerKVSpec(num_kv_heads=kv_heads, head_dim=dim, window=window)
    return AttentionSpec(layer_idx=0, num_heads=heads, kv=kv, scale=dim**-0.5, softcap=softcap)
