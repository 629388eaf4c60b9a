"""Each Triton kernel, by types and shapes, beside torch on the same device, which computes in fp32 from equal inputs.

A case imports what it needs of the engine itself, so that an ImportError costs no other one. Without a GPU, Triton's
interpreter runs the kernels in few small shapes; it computes bf16 wrongly, so that type is left out.
"""

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu.step import Case, LeftOut, Step, parse_step, run_cases
from torch import Tensor

BLOCK = 16
E4M3 = "float8_e4m3fn"
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}  # of ||out - reference|| / ||reference||
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
ROUNDED = {"scale of each row": None, "static scale": 0.02, "groups of 128": None}  # and a given scale
GROUP_KINDS = ("int4", "int4 with zeros", "int4 with minimums", "int8", "e4m3", "table4")
ROTATIONS = ((64, 64, False), (80, 80, True), (96, 48, False), (64, 0, False), (128, 128, True), (256, 256, True))
PRELOADED = ("octavo_testing.attention_cases", "octavo_testing.draw_cases", "octavo_engine.ops.triton.sampling")


def relative_error(got: Tensor, want: Tensor) -> float:
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    return float(difference) if got.isfinite().all() else float("inf")


def report_errors(step: Step, name: str, pairs: dict[str, tuple[Tensor, Tensor]], tolerance: float) -> None:
    """Report the largest error of (found, wanted) pairs; the note has those beyond the tolerance, or all."""
    errors = {key: relative_error(*pair) for key, pair in pairs.items()}
    bad = {key: error for key, error in errors.items() if not error <= tolerance}
    note = ", ".join(f"{key} {error:.1e}" for key, error in (bad or errors).items())
    step.check(name, not bad, max(errors.values()), "error", note)


def backends(step: Step, spec: Any, dtype: str, num_blocks: int) -> tuple[Any, Any]:
    """Return the engine's backend and the reference in fp32, with equal random caches of a type."""
    from octavo_engine.devices.cuda_device import CudaDevice
    from octavo_engine.ops.cuda_backend import CudaBackend
    from octavo_engine.ops.reference import ReferenceBackend
    from octavo_testing.attention_cases import E4M3Reference, e4m3_codes

    kind = getattr(torch, dtype)
    own: Any = CudaBackend([spec], BLOCK, kind, "cpu", num_programs=5)
    own = CudaDevice().attention_backend([spec], BLOCK, kind) if step.is_gpu else own
    reference = ReferenceBackend([spec], BLOCK, torch.float32, step.device)
    own.allocate(num_blocks)
    (cache,) = own.caches
    if dtype == E4M3:
        reference = E4M3Reference([spec], BLOCK, step.device)
        cache.copy_(e4m3_codes(torch.randn(cache.shape, device=step.device), spec.k_scale).view(torch.uint8))
    else:
        cache.normal_()
    reference.caches = [cached_values(cache, spec)]
    return own, reference


def cached_values(cache: Tensor, spec: Any) -> Tensor:
    """Return keys and values in the layout of the reference, which has no scales."""
    from octavo_testing.attention_cases import in_reference_layout

    scales = torch.tensor([spec.k_scale, spec.v_scale], device=cache.device)
    return in_reference_layout(cache) * scales.view(2, 1, 1, 1, 1)


def attend(backend: Any, spec: Any, qkv: list[Tensor], batch: Any) -> Tensor:
    backend.begin_step(batch)
    out: Tensor = backend.attend(spec, *qkv, batch)
    return out


def attention(step: Step, name: str, dtype: str, dim: int, group: int, variant: str, *, cached: str) -> None:
    """Check the kernel of sequences with one query in the step, that of the others, and the write of both."""
    from octavo_testing import attention_cases as inputs

    spec = inputs.make_spec(heads=2 * group, kv_heads=2, dim=dim, **VARIANTS[variant])
    if cached == E4M3:
        spec = replace(spec, kv=replace(spec.kv, k_scale=0.02, v_scale=0.03))
    pairs: dict[str, dict[str, Any]] = {"decode_attention": {}, "paged_attention": {}, "write_kv": {}}
    for mix, sizes in MIXES[step.device].items():
        batch, num_blocks = inputs.make_batch([inputs.SeqShape(*size) for size in sizes], BLOCK)
        batch = inputs.on_device(batch, step.device)
        own, reference = backends(step, spec.kv, cached, num_blocks)
        qkv = [x.to(step.device) for x in inputs.random_qkv(spec, len(batch.slots), getattr(torch, dtype), seed=0)]
        got, again = attend(own, spec, qkv, batch), attend(own, spec, qkv, batch)
        got = torch.where(got == again, got, torch.nan)  # a repetition has the same bits
        wide = [x.float() for x in qkv]
        attend(reference, spec, wide, batch)
        written = cached_values(own.caches[0], spec.kv)
        pairs["write_kv"][mix] = written, reference.caches[0]
        reference.caches = [written]  # attention is judged by the keys that it has read
        want = attend(reference, spec, wide, replace(batch, slots=torch.full_like(batch.slots, -1)))
        counts = batch.query_start.diff()
        is_single = (counts == 1).repeat_interleave(counts)
        for kernel, rows in (("decode_attention", is_single), ("paged_attention", ~is_single)):
            if rows.any():
                pairs[kernel][mix] = got[rows], want[rows]
    for kernel, found in pairs.items():
        report_errors(step, name.replace("attention", kernel), found, TOLERANCE[dtype] * (kernel != "write_kv"))


def fused(step: Step, name: str, kernel: str, dtype: str, **shape: Any) -> None:
    """Check a fused write, or norms and gates of all sizes."""
    from octavo_testing import kernel_cases

    kind, pairs = getattr(torch, dtype), {}
    if kernel == "write_qkv":
        pairs = kernel_cases.fused_write_pairs(**shape, dtype=kind, device=step.device, block_size=BLOCK)
    if kernel == "write_qkv to e4m3":
        pairs = kernel_cases.fused_code_pairs(**shape, dtype=kind, device=step.device, block_size=BLOCK)
    for size in SIZES[step.device] if kernel == "rms_norm" else ():
        found = kernel_cases.norm_pairs(33, size, kind, step.device)
        pairs |= {f"size {size}, {way}": pair for way, pair in found.items()}
    for size in SIZES[step.device] if kernel == "gate" else ():
        for way in ("silu", "gelu_pytorch_tanh"):
            pairs[f"{way} {size}"] = kernel_cases.gate_pair(way, 17, size, kind, step.device)
    report_errors(step, name, pairs, TOLERANCE[dtype])


def bits(step: Step, name: str, dtype: str, dim: int) -> None:
    """The bits of a sequence depend on no other one, on no row of padding, and on no graph that replays the step."""
    from octavo_testing import attention_cases as inputs

    spec = inputs.make_spec(heads=8, kv_heads=2, dim=dim)
    lengths = (0, 700, 511, 512, 1100, 3000) if step.is_gpu else (0, 30, 513)
    batch, num_blocks = inputs.make_batch([inputs.SeqShape(n, 1) for n in lengths], BLOCK)
    backend, _ = backends(step, spec.kv, dtype, num_blocks)
    qkv = [x.to(step.device) for x in inputs.random_qkv(spec, len(lengths), getattr(torch, dtype), seed=2)]

    def outputs(seqs: list[int], padding: int = 0) -> Tensor:
        part, _ = inputs.part_of(batch, seqs, padding)
        some = [x[seqs + seqs[:1] * padding] for x in qkv]
        return attend(backend, spec, some, inputs.on_device(part, step.device))[: len(seqs)]

    every = [*range(len(lengths))]
    crowded = outputs(every)
    step.check(f"{name}: alone = in a batch", torch.equal(torch.cat([outputs([i]) for i in every]), crowded))
    step.check(f"{name}: padded = without padding", torch.equal(outputs(every, 5), crowded))
    if step.is_gpu:
        whole, graph = inputs.on_device(batch, step.device), torch.cuda.CUDAGraph()
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
        return sample(logits.to(step.device), torch.from_numpy(params.view("i4").reshape(-1, 8)).to(step.device)).cpu()

    logits = draw_cases.random_logits(rows, vocab)
    params = draw_cases.draw_params(rows, vocab, **draw_cases.FILTERS[filters])
    ties = draw_cases.near_ties(logits, params, kernel)
    logits[0, -1] = float("nan")
    step.check(name, int(kernel(logits, params)[0]) == -1, ties, "near ties", "the token of a row with NaN is -1")


def group_product(step: Step, name: str, kind: str, dtype: str) -> None:
    """Check products with weights in groups, by rows, of an odd number of outputs, and of the expanded weight."""
    from octavo_engine.ops.triton.group_linear import group_linear
    from octavo_testing.group_cases import GroupCase, random_group_tensor

    pairs = {}
    for group, size in ((32, 1024), (64, 1024), (128, 4096), (4096, 4096)) if step.is_gpu else ((64, 128),):
        weight = random_group_tensor(kind, 1027 if step.is_gpu else 35, size, group, device=step.device)
        for rows in (1, 16, 17, 64, 256, 300) if step.is_gpu else (1, 17):
            x = torch.randn(rows, size, device=step.device).to(getattr(torch, dtype))
            pairs[f"{rows} x {size}, groups of {group}"] = (
                group_linear(x, weight),
                GroupCase(x, weight, None).reference(),
            )
    report_errors(step, name, pairs, TOLERANCE[dtype])


def e4m3_of(step: Step) -> contextlib.AbstractContextManager[None]:
    """Let the interpreter convert e4m3 as a GPU does. Raises LeftOut on a GPU without products of FP8."""
    if step.is_gpu:
        from octavo_engine.devices.cuda_device import has_fp8

        if not has_fp8(torch.device(step.device)):
            raise LeftOut("the GPU multiplies no FP8 numbers: its compute capability is below 8.9")
        return contextlib.nullcontext()
    from octavo_testing.triton_device import exact_e4m3

    return exact_e4m3()


def rounded_product(step: Step, name: str, kind: str, dtype: str) -> None:
    """Check products of rounded rows by the kernel and, where torch has the product, by torch."""
    from octavo_engine.ops.group_tensor import expand_groups
    from octavo_engine.ops.triton.fp8_linear import DEPTH, fp8_linear, prepare_fp8
    from octavo_testing.group_cases import random_group_tensor, rounded_by_torch

    size, outs, counts = (4096, (1040, 1027), (1, 16, 17, 64, 300)) if step.is_gpu else (256, (48, 35), (1, 17))
    scale, pairs, number = ROUNDED[kind], {}, getattr(torch, dtype)
    with e4m3_of(step):
        for out in outs:
            group = DEPTH if kind == "groups of 128" else size
            weight = random_group_tensor("e4m3", out, size, group, device=step.device)
            prepared = prepare_fp8(weight, None, number, scale)
            step.figure(f"{name}: {out} outputs by torch's _scaled_mm", "yes" if prepared.has_product else "no")
            ways = {"kernel": replace(prepared, has_product=False)}
            ways |= {"torch": prepared} if prepared.has_product else {}
            for rows in counts:
                x = (3 * torch.randn(rows, size, device=step.device)).to(number)
                want = rounded_by_torch(x, size // group, scale) @ expand_groups(weight, torch.float64).t()
                pairs |= {f"{rows} x {out} by {way}": (fp8_linear(x, each), want) for way, each in ways.items()}
    report_errors(step, name, pairs, TOLERANCE[dtype])


def experts(step: Step, name: str, dtype: str) -> None:
    """Check the products of experts, by each tile, with a gate between and the sum of each row."""
    from octavo_engine.ops.triton.expert_linear import TILES
    from octavo_testing.expert_cases import ExpertCase

    many = {"size": 1024, "inner": 768, "experts": 64} if step.is_gpu else {}
    pairs = {}
    for rows, top_k in ((1, 2), (70, 8), (300, 4)) if step.is_gpu else ((5, 2),):
        case = ExpertCase.make(rows, top_k, **many).to(getattr(torch, dtype), step.device)
        for tile in TILES:
            pairs[f"{rows} rows, {top_k} each, tiles of {tile.rows}"] = case.compute(tile), case.reference()
    report_errors(step, name, pairs, TOLERANCE[dtype])


def attention_shapes(step: Step, dtype: str) -> list[tuple[int, int, str]]:
    """Return sizes of a head, heads for each KV head, and variants; the most usual first."""
    if not step.is_gpu:
        return [(80, 2, "window"), (64, 7, "cap")] if dtype == "float32" else [(64, 4, "plain")]
    groups = (4, 1, 2, 7, 8) if dtype == "bfloat16" else (4, 7)
    plain = [(dim, group, "plain") for dim in (128, 64, 80, 96, 256) for group in groups]
    others = [(dim, group, v) for dim, group, _ in plain if group in (2, 4) for v in ("window", "cap")]
    return plain + (others if dtype == "bfloat16" else others[:2])


def is_cached_in_fp8(step: Step, dtype: str, dim: int, group: int, variant: str) -> bool:
    """Return True for the shapes that are also checked with a cache of e4m3."""
    is_usual = dim == 128 or (dim == 64 and variant == "plain")
    return dtype != "float32" and group in (4, 7) and (is_usual if step.is_gpu else dim == 64)


def cases_of(step: Step) -> dict[str, Case]:
    """Return the cases by names of kernel, type and shape; attention of unusual heads is last."""
    found: dict[str, Case] = {}

    def add(name: str, check: Callable[..., None], **shape: Any) -> None:
        found[name] = partial(check, name=name, **shape)

    add("blocks e4m3", blocks, dtype=E4M3)
    for dtype in ("bfloat16", "float16", "float32") if step.is_gpu else ("float32", "float16"):
        add(f"blocks {dtype}", blocks, dtype=dtype)
        for kernel in ("rms_norm", "gate"):
            add(f"{kernel} {dtype}", fused, kernel=kernel, dtype=dtype)
        add(f"experts {dtype}", experts, dtype=dtype)
        for kind in GROUP_KINDS if dtype != "float32" else ():
            add(f"group_linear {dtype} {kind}", group_product, kind=kind, dtype=dtype)
        for kind in ROUNDED if dtype != "float32" else ():
            add(f"fp8_linear {dtype} {kind}", rounded_product, kind=kind, dtype=dtype)
        for dim, rotary, has_norm in ROTATIONS if step.is_gpu else ROTATIONS[:2]:
            shape = {"dtype": dtype, "dim": dim, "rotary": rotary, "has_norm": has_norm}
            name = f"write_qkv {dtype} dim {dim}, {rotary} rotary{', norm' * has_norm}"
            add(name, fused, kernel="write_qkv", **shape)
            if dtype != "float32":
                add(f"{name}, e4m3 cache", fused, kernel="write_qkv to e4m3", **shape)
        for dim, group, variant in attention_shapes(step, dtype):
            name = f"attention {dtype} dim {dim}, {group} heads a KV head, {variant}"
            shape = {"dtype": dtype, "dim": dim, "group": group, "variant": variant}
            add(name, attention, **shape, cached=dtype)
            if is_cached_in_fp8(step, **shape):
                add(f"{name}, e4m3 cache", attention, **shape, cached=E4M3)
    dtype, dim = ("bfloat16", 128) if step.is_gpu else ("float32", 16)
    add(f"decode_attention {dtype} dim {dim}", bits, dtype=dtype, dim=dim)
    for rows, vocab in ((1, 151936), (64, 151936), (256, 151936)) if step.is_gpu else ((2, 3000),):
        for filters in FILTERS if rows < 256 else FILTERS[:3]:
            add(f"sample float32 {rows} x {vocab}, {filters}", sampling, rows=rows, vocab=vocab, filters=filters)
    return dict(sorted(found.items(), key=lambda case: "attention" in case[0] and "128" not in case[0]))


def main() -> None:
    step = parse_step("kernels")
    torch.set_grad_enabled(False)
    for module in PRELOADED:  # an error is that of the cases that import it again
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    if not step.is_gpu:
        from octavo_engine.ops import triton_devices

        triton_devices.DEVICES = {"cpu"}
    run_cases(step, cases_of(step), workers=min(12, os.cpu_count() or 1) if step.is_gpu else 2, case_s=90.0)


if __name__ == "__main__":
    main()
