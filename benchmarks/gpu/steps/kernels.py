"""Each Triton kernel, by types and shapes, beside torch on the same device, which computes in fp32 from equal inputs.

A case imports what it needs of the engine itself, so that an ImportError costs no other one. Without a GPU, Triton's
interpreter runs the kernels in few small shapes; it computes bf16 wrongly, so that type is left out.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu.case_pool import Case, run_cases
from gpu.step import Step
from torch import Tensor

BLOCK, INFINITE = 16, float("inf")
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}  # of ||out - reference|| / ||reference||
TYPES = {"cuda": ("bfloat16", "float16", "float32"), "cpu": ("float32", "float16")}
MIXES = {  # (tokens with KV before, tokens of this step) of each sequence
    "cuda": {
        "decode": [(n, 1) for n in (0, 1, 15, 16, 17, 100, 511, 512, 900)],
        "prefill": [(0, n) for n in (2, 15, 16, 17, 33, 130)],
        "mixed": [(0, 20), (70, 1), (33, 9), (15, 1), (600, 3), (1, 1), (0, 1)],
        "long": [(3999, 1), (3500, 150), (0, 1000), (1700, 1)],
    },
    "cpu": {"decode": [(0, 1), (17, 1)], "mixed": [(0, 20), (33, 1), (15, 3)]},
}
VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 24}, "cap": {"window": 700, "softcap": 5.0}}
SIZES = {"cuda": (7, 896, 1024, 3072, 8192, 14336), "cpu": (7, 64)}
FILTERS = ("greedy", "none", "top-k-top-p", "cool", "top-k", "top-1", "most", "top-p", "top-p-hot", "min-p", "all")
ROTATIONS = ((64, 64, False), (80, 80, True), (96, 48, False), (64, 0, False), (128, 128, True), (256, 256, True))


def relative_error(got: Tensor, want: Tensor) -> float:
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    return float(difference) if got.isfinite().all() else INFINITE


def report_errors(step: Step, name: str, errors: dict[str, float], tolerance: float) -> None:
    """Report the largest error; the note has those beyond the tolerance, or all."""
    bad = {key: error for key, error in errors.items() if not error <= tolerance}
    note = ", ".join(f"{key} {error:.1e}" for key, error in (bad or errors).items())
    step.check(name, not bad, max(errors.values()), "error", note)


def backends(step: Step, spec: Any, dtype: str, num_blocks: int) -> tuple[Any, Any]:
    """Return the engine's backend and the reference in fp32, with equal random caches."""
    from octavo_engine.devices.cuda_device import CudaDevice
    from octavo_engine.ops.cuda_backend import CudaBackend
    from octavo_engine.ops.reference import ReferenceBackend

    kind = getattr(torch, dtype)
    own: Any = CudaBackend([spec], BLOCK, kind, "cpu", num_programs=5)
    own = CudaDevice().attention_backend([spec], BLOCK, kind) if step.is_gpu else own
    reference = ReferenceBackend([spec], BLOCK, torch.float32, step.device)
    own.allocate(num_blocks)
    own.caches[0].normal_()
    reference.caches = [in_reference_layout(own.caches[0])]
    return own, reference


def in_reference_layout(cache: Tensor) -> Tensor:
    return cache.float().permute(1, 0, 3, 2, 4).contiguous()


def on_device(batch: Any, step: Step) -> Any:
    names = ("query_start", "seq_lens", "block_tables", "slots", "positions")
    return replace(batch, **{name: getattr(batch, name).to(step.device) for name in names})


def attend(backend: Any, spec: Any, qkv: list[Tensor], batch: Any) -> Tensor:
    backend.begin_step(batch)
    out: Tensor = backend.attend(spec, *qkv, batch)
    return out


def attention(step: Step, name: str, dtype: str, dim: int, group: int, variant: str) -> None:
    """Check the kernel of sequences with one query in the step, that of the others, and the write of both."""
    from octavo_testing.attention_cases import SeqShape, make_batch, make_spec, random_qkv

    spec = make_spec(heads=2 * group, kv_heads=2, dim=dim, **VARIANTS[variant])
    errors: dict[str, dict[str, float]] = {"decode_attention": {}, "paged_attention": {}, "write_kv": {}}
    for mix, sizes in MIXES[step.device].items():
        batch, num_blocks = make_batch([SeqShape(*size) for size in sizes], BLOCK)
        batch = on_device(batch, step)
        own, reference = backends(step, spec.kv, dtype, num_blocks)
        qkv = [x.to(step.device) for x in random_qkv(spec, len(batch.slots), getattr(torch, dtype), seed=0)]
        got, again = attend(own, spec, qkv, batch), attend(own, spec, qkv, batch)
        wide = [x.float() for x in qkv]
        attend(reference, spec, wide, batch)
        written = in_reference_layout(own.caches[0])
        errors["write_kv"][mix] = relative_error(written, reference.caches[0])
        reference.caches = [written]  # attention is judged by the keys that it has read
        want = attend(reference, spec, wide, replace(batch, slots=torch.full_like(batch.slots, -1)))
        counts = torch.tensor([count for _, count in sizes], device=step.device)
        is_single = (counts == 1).repeat_interleave(counts)
        for kernel, rows in (("decode_attention", is_single), ("paged_attention", ~is_single)):
            if rows.any():
                is_same = torch.equal(got[rows], again[rows])  # when it is repeated
                errors[kernel][mix] = relative_error(got[rows], want[rows]) if is_same else INFINITE
    for kernel, found in errors.items():
        report_errors(step, name.replace("attention", kernel), found, TOLERANCE[dtype] * (kernel != "write_kv"))


def fused_write(step: Step, name: str, dtype: str, dim: int, rotary: int, has_norm: bool) -> None:
    """Check the queries, and the cache with keys and values of which every seventh has no slot."""
    from octavo_engine.ops.norm import rms_norm_reference, rms_weight
    from octavo_engine.ops.rope import Rotation, rotate_reference_
    from octavo_engine.ops.triton.write_qkv import write_qkv

    kind, heads, tokens = getattr(torch, dtype), 6, 33
    norm = rms_weight((1 + torch.randn(heads + 2, dim) / 10).to(step.device), 1e-6) if has_norm else None
    angle = torch.randn(tokens, rotary // 2)
    cos, sin = angle.cos(), angle.sin()
    table = torch.cat((cos, cos, -sin, sin), -1).to(kind).to(step.device).view(tokens, 2, 1, rotary)
    fused = torch.randn(tokens, heads + 4, dim).to(kind).to(step.device)
    cache = torch.randn(5, 2, 2, BLOCK, dim).to(kind).to(step.device)
    slots = torch.randperm(5 * BLOCK)[:tokens].to(step.device)
    slots[::7] = -1
    used, qk, want = slots >= 0, fused[:, : heads + 2].float().clone(), in_reference_layout(cache)
    if norm is not None:
        qk = rms_norm_reference(qk, norm)
    if rotary:
        rotate_reference_(qk, *table.float().unbind(1))
    for half, x in enumerate((qk[:, heads:], fused[:, heads + 2 :].float())):
        want[half].flatten(0, 1)[slots[used]] = x[used]
    rotation = Rotation(*table.unbind(1)) if rotary else None
    queries = write_qkv(cache, fused[:, : heads + 2], fused[:, heads + 2 :], slots, norm, rotation)
    errors = {"queries": relative_error(queries, qk[:, :heads])}
    errors["cache"] = relative_error(in_reference_layout(cache), want)
    report_errors(step, name, errors, TOLERANCE[dtype])


def norms(step: Step, name: str, dtype: str) -> None:
    from octavo_engine.ops.norm import add_rms_norm, rms_norm, rms_norm_reference, rms_weight

    errors = {}
    for size in SIZES[step.device]:
        x, update = (torch.randn(33, size, device=step.device).to(getattr(torch, dtype)) for _ in range(2))
        weight, total = rms_weight(torch.randn(size, device=step.device), 1e-5), x + update
        errors[f"size {size}"] = relative_error(rms_norm(x, weight), rms_norm_reference(x.float(), weight))
        added = add_rms_norm(update, x, weight)  # it changes x
        errors[f"size {size}, added"] = relative_error(added, rms_norm_reference(total.float(), weight))
        errors[f"size {size}, sum"] = 0.0 if torch.equal(x, total) else INFINITE
    report_errors(step, name, errors, TOLERANCE[dtype])


def gates(step: Step, name: str, dtype: str) -> None:
    from octavo_engine.ops.activation import ACTIVATIONS, act_mul, act_mul_reference

    errors = {}
    for activation in ("silu", "gelu_pytorch_tanh"):
        for size in SIZES[step.device]:
            gate_up = (3 * torch.randn(17, 2 * size + 3, device=step.device)).to(getattr(torch, dtype))[:, : 2 * size]
            want = act_mul_reference(gate_up.float(), ACTIVATIONS[activation])
            errors[f"{activation} {size}"] = relative_error(act_mul(gate_up, ACTIVATIONS[activation]), want)
    report_errors(step, name, errors, TOLERANCE[dtype])


def bits(step: Step, name: str, dtype: str, dim: int) -> None:
    """The bits of a sequence depend on no other one, on no row of padding, and on no graph that replays the step."""
    from octavo_testing.attention_cases import SeqShape, make_batch, make_spec, random_qkv

    spec = make_spec(heads=8, kv_heads=2, dim=dim)
    lengths = (0, 700, 511, 512, 1100, 3000) if step.is_gpu else (0, 30, 513)
    batch, num_blocks = make_batch([SeqShape(n, 1) for n in lengths], BLOCK)
    backend, _ = backends(step, spec.kv, dtype, num_blocks)
    qkv = [x.to(step.device) for x in random_qkv(spec, len(lengths), getattr(torch, dtype), seed=2)]
    pad: Callable[..., Tensor] = torch.nn.functional.pad

    def outputs(rows: list[int], padding: int = 0) -> Tensor:
        names = {"seq_lens": 0, "slots": -1, "positions": 0}
        some = {key: pad(getattr(batch, key)[rows], (0, padding), value=value) for key, value in names.items()}
        tables = pad(batch.block_tables[rows], (0, 0, 0, padding))
        starts = torch.arange(len(rows) + padding + 1, dtype=torch.int32)
        part = on_device(replace(batch, query_start=starts, block_tables=tables, **some), step)
        return attend(backend, spec, [x[rows + rows[:1] * padding] for x in qkv], part)[: len(rows)]

    every = list(range(len(lengths)))
    crowded = outputs(every)
    step.check(f"{name}: alone = in a batch", torch.equal(torch.cat([outputs([i]) for i in every]), crowded))
    step.check(f"{name}: padded = without padding", torch.equal(outputs(every, 5), crowded))
    if step.is_gpu:
        whole, graph = on_device(batch, step), torch.cuda.CUDAGraph()
        attend(backend, spec, qkv, whole)
        with torch.cuda.graph(graph):
            out = attend(backend, spec, qkv, whole)
        graph.replay()
        step.check(f"{name}: in a CUDA graph = without", torch.equal(out, crowded))


def blocks(step: Step, name: str, dtype: str) -> None:
    """Copies of blocks, and swaps to pinned and to pageable memory, in more than one chunk."""
    from octavo_engine.devices.cuda_device import CudaDevice
    from octavo_engine.ops.attention import LayerKVSpec

    count = 600 if step.is_gpu else 40
    backend, _ = backends(step, LayerKVSpec(num_kv_heads=2, head_dim=64), dtype, count)
    (cache,), size = backend.caches, backend.bytes_per_block()
    hosts = {"pageable": torch.zeros(count, size, dtype=torch.uint8)}
    if step.is_gpu:
        hosts["pinned"] = CudaDevice().host_blocks(count, size)
        step.check(f"{name}: swap space is pinned", hosts["pinned"].is_pinned())
    for kind, host in hosts.items():
        before, rows = cache.clone(), torch.randperm(count).tolist()
        backend.swap_out(list(enumerate(rows)), host)
        cache.zero_()
        backend.swap_in([(row, block) for block, row in enumerate(rows)], host)
        step.check(f"{name}: swapped out and in, {kind}", torch.equal(cache, before))
    want, half = cache.clone(), count // 2
    want[half:] = want[:half]
    backend.copy_blocks([(i, half + i) for i in range(half)])
    step.check(f"{name}: copied", torch.equal(cache, want))


def sampling(step: Step, name: str, rows: int, vocab: int, filters: str) -> None:
    """Tokens equal the CPU's, except where the last bits of two sums decide; a row with NaN gets none."""
    from octavo_engine.ops.triton.sampling import sample
    from octavo_testing import draw_cases

    def kernel(logits: Tensor, params: Any) -> Tensor:
        return sample(logits.to(step.device), torch.from_numpy(params.packed()).to(step.device)).cpu()

    logits = draw_cases.random_logits(rows, vocab)
    params = draw_cases.draw_params(rows, vocab, **draw_cases.FILTERS[filters])
    ties = draw_cases.near_ties(logits, params, kernel)
    logits[0, -1] = float("nan")
    step.check(name, int(kernel(logits, params)[0]) == -1, ties, "near ties", "the token of a row with NaN is -1")


def attention_shapes(step: Step, dtype: str) -> list[tuple[int, int, str]]:
    """Return sizes of a head, heads for each KV head, and variants; the most usual first."""
    if not step.is_gpu:
        return [(80, 2, "window"), (64, 7, "cap")] if dtype == "float32" else [(64, 4, "plain")]
    groups = (4, 1, 2, 7, 8) if dtype == "bfloat16" else (4, 7)
    plain = [(dim, group, "plain") for dim in (128, 64, 80, 96, 256) for group in groups]
    others = [(dim, group, v) for dim, group, _ in plain if group in (2, 4) for v in ("window", "cap")]
    return plain + (others if dtype == "bfloat16" else others[:2])


def cases(step: Step) -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(name: str, check: Callable[..., None], **shape: Any) -> None:
        found[name] = partial(check, name=name, **shape)

    for dtype in TYPES[step.device]:
        for name, check in (("rms_norm", norms), ("gate", gates), ("blocks", blocks)):
            add(f"{name} {dtype}", check, dtype=dtype)
        for dim, rotary, has_norm in ROTATIONS if step.is_gpu else ROTATIONS[:2]:
            shape = {"dtype": dtype, "dim": dim, "rotary": rotary, "has_norm": has_norm}
            add(f"write_qkv {dtype} dim {dim}, {rotary} rotary{', norm' * has_norm}", fused_write, **shape)
        for dim, group, variant in attention_shapes(step, dtype):
            shape = {"dtype": dtype, "dim": dim, "group": group, "variant": variant}
            add(f"attention {dtype} dim {dim}, {group} heads a KV head, {variant}", attention, **shape)
    dtype, dim = ("bfloat16", 128) if step.is_gpu else ("float32", 16)
    add(f"decode_attention {dtype} dim {dim}", bits, dtype=dtype, dim=dim)
    for rows, vocab in ((1, 151936), (64, 151936), (256, 151936)) if step.is_gpu else ((2, 3000),):
        for filters in FILTERS if rows < 256 else FILTERS[:3]:
            add(f"sample float32 {rows} x {vocab}, {filters}", sampling, rows=rows, vocab=vocab, filters=filters)
    return dict(sorted(found.items(), key=lambda case: "attention" in case[0] and "128" not in case[0]))


def prepare(step: Step) -> dict[str, Case]:
    torch.set_num_threads(2 if step.is_gpu else 1)
    torch.set_grad_enabled(False)
    if not step.is_gpu:
        from octavo_engine.ops import triton_devices

        triton_devices.DEVICES = {"cpu"}
    return cases(step)


if __name__ == "__main__":
    num_workers = {"cuda": min(12, os.cpu_count() or 1), "cpu": 2}
    sys.exit(run_cases("kernels", prepare, workers=lambda step: num_workers[step.device], case_s=lambda step: 90.0))
