"""Speed: sampling and attention alone, the engine beside its floor, a profile of its steps, and its memory.

Cases run one after the other, each in a process of its own. Without a GPU they run in small sizes, whose figures mean
nothing.
"""

import inspect
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu.dummy_models import SHAPES, generate, open_engine, start_decoding, write_config
from gpu.step import Case, LeftOut, Step, parse_step, run_cases
from gpu.timing import median_s
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity

SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "k20 p0.95": SAMPLED}
DECODES = {"cuda": ((256, 1024), (32, 1024), (8, 8192), (1, 32768), (1, 1024)), "cpu": ((2, 40),)}
PROMPTS = {"cuda": (2048, 8192), "cpu": (24,)}
MODEL = {"cuda": "Qwen3-0.6B", "cpu": "tiny-llama"}
SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {"dtype": "bfloat16", "max_num_seqs": 256},  # as many as the peers
    "cpu": {"dtype": "bfloat16", "num_gpu_blocks_override": 100, "max_model_len": 256, "num_threads": 1},
}
CASE_S, LOAD_S = 190.0, 45.0  # most seconds of a case, and of one load of requests
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128  # of Qwen3-0.6B
LINEARS = {"cuda": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), "cpu": ((70, 256),)}  # of Llama-3-8B
GROUPS = {"int4 with zeros": 128, "int8": 64, "e4m3": 64}  # kinds, and the inputs of a group
PEERS = ("vllm", "sglang")
HOST_CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")

Sizes = list[tuple[int, int]]  # prompt and output tokens of requests that start at once


def bandwidth(step: Step) -> float:
    return 1e9 * (step.measured("copy bandwidth") or 3000.0)


def sampling(step: Step) -> None:
    from octavo_engine.devices.cuda_device import CudaDevice
    from octavo_engine.devices.transfers import keep
    from octavo_engine.sampling.draws import choose_tokens
    from octavo_testing.draw_cases import draw_params

    copy = CudaDevice().input_copy() if step.is_gpu else keep
    vocab, sizes = (151936, (1, 64, 256)) if step.is_gpu else (4096, (1, 4))
    for rows in sizes:
        logits = torch.randn(rows, vocab, device=step.device) * 2
        passing = f"one pass over the logits: {1e6 * logits.nbytes / bandwidth(step):.0f} us"
        for name, kind in {**KINDS, "p0.95": {"temperature": 0.8, "top_p": 0.95}}.items():
            draw = partial(choose_tokens, logits, draw_params(rows, vocab, **kind), copy)
            step.figure(
                f"sample {rows} x {vocab}, {name}", 1e6 * median_s(draw, step.device, most_s=0.3), "us", passing
            )
        took = median_s(partial(logits.argmax, -1), step.device, most_s=0.1)
        step.figure(f"torch's argmax of {rows} x {vocab}", 1e6 * took, "us")


def replayed_s(work: Callable[[], object], step: Step) -> float:
    """Return the seconds of a call as a decode step makes it: by replays of a CUDA graph, without the host's part."""
    if not step.is_gpu:
        return median_s(work, step.device)
    work()  # it compiles, which no capture may
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return median_s(graph.replay, step.device, most_s=0.3)


def own_attention_s(step: Step, seqs: int, length: int, queries: int, cached: str = "") -> float:
    """Return the seconds of a layer's attention, for the last `queries` tokens of each sequence.

    `cached`: the type of keys and values in the cache; empty: that of the model.
    """
    from gpu.steps.kernels import BLOCK, backends
    from octavo_engine.ops.attention import AttentionSpec, LayerKVSpec
    from octavo_testing.attention_cases import SeqShape, make_batch, on_device

    kv = LayerKVSpec(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    spec = AttentionSpec(layer_idx=0, num_heads=HEADS, kv=kv, scale=HEAD_DIM**-0.5)
    batch, num_blocks = make_batch([SeqShape(length - queries, queries)] * seqs, BLOCK)
    backend, _ = backends(step, kv, cached or ("bfloat16" if step.is_gpu else "float32"), num_blocks)
    batch = on_device(batch, step.device)
    backend.begin_step(batch)
    return replayed_s(partial(backend.attend, spec, *random_qkv(step, seqs * queries), batch), step)


def random_qkv(step: Step, num_tokens: int) -> list[Any]:
    kind = torch.bfloat16 if step.is_gpu else torch.float32  # the interpreter computes bf16 wrongly
    shapes = ((num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [torch.randn(shape, device=step.device, dtype=kind) for shape in shapes]


def decode_attention(step: Step) -> None:
    for seqs, length in DECODES[step.device]:
        took = own_attention_s(step, seqs, length, 1)
        share = seqs * length * 2 * KV_HEADS * HEAD_DIM * 2 / bandwidth(step) / took
        step.figure(f"decode attention {seqs} x {length}", 100 * share, "% of bandwidth", f"{1e6 * took:.0f} us")


def coded_attention(step: Step) -> None:
    """Measure decode attention with a cache of e4m3 beside one in 16 bits."""
    from gpu.steps.kernels import E4M3

    for seqs, length in DECODES[step.device]:
        wide, took = (own_attention_s(step, seqs, length, 1, cached) for cached in ("", E4M3))
        share = seqs * length * 2 * KV_HEADS * HEAD_DIM / bandwidth(step) / took
        note = f"{1e6 * took:.0f} us, {wide / took:.2f} times as fast as with a cache in 16 bits"
        step.figure(f"decode attention {seqs} x {length}, e4m3 cache", 100 * share, "% of bandwidth", note)


def prompt_attention(step: Step) -> None:
    from torch.nn.attention.varlen import varlen_attn

    for length in PROMPTS[step.device]:
        own = own_attention_s(step, 1, length, length)
        rate = 4 * HEADS * HEAD_DIM * length**2 / 2 / own / 1e12
        step.figure(f"prompt attention {length}", 1e3 * own, "ms", f"{rate:.0f} TFLOP/s")
        with torch.inference_mode():
            peer = replayed_s(peer_attention(varlen_attn if step.is_gpu else None, *random_qkv(step, length)), step)
        note = f"ours takes {own / peer:.2f} times as long"
        step.figure(f"prompt attention {length} by torch", 1e3 * peer, "ms", note)


def peer_attention(varlen: Callable[..., Any] | None, q: Any, k: Any, v: Any) -> Callable[[], Any]:
    """Return torch's causal attention of one prompt: `varlen_attn`, or SDPA without it.

    Without `enable_gqa`, which torch 2.11 lacks, heads are expanded.
    """
    if varlen is None:
        heads_first = [each.transpose(0, 1)[None] for each in (q, k, v)]
        return partial(F.scaled_dot_product_attention, *heads_first, is_causal=True, enable_gqa=True)
    more = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen).parameters else {}
    if not more:
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    ends = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    return partial(varlen, q, k, v, ends, ends, len(q), len(q), window_size=(-1, 0), **more)


def linears(step: Step) -> None:
    """Measure the four linears of a layer, whose weights no cache holds: in groups, beside torch's in 16 bits."""
    from octavo_engine.ops.triton.group_linear import expand, group_linear
    from octavo_testing.group_cases import random_group_tensor

    kind, shapes = torch.bfloat16 if step.is_gpu else torch.float16, LINEARS[step.device]
    plain: list[Any] = [torch.randn(shape, device=step.device).to(kind) for shape in shapes]
    weights: dict[str, list[Any]] = {
        name: [random_group_tensor(name, *shape, group, device=step.device) for shape in shapes]
        for name, group in GROUPS.items()
    }

    def took_s(linear: Callable[[Any, Any], Any], xs: list[Any], parts: list[Any]) -> float:
        return replayed_s(lambda: [*map(linear, xs, parts)], step)

    for rows in (1, 16, 64, 256) if step.is_gpu else (1,):
        xs = [torch.randn(rows, size, device=step.device).to(kind) for _, size in shapes]
        torch_s = took_s(F.linear, xs, plain)
        step.figure(f"linears of {rows} rows, bf16", sum(part.nbytes for part in plain) / torch_s / 1e9, "GB/s")
        for name, parts in weights.items():
            own_s = took_s(group_linear, xs, parts)
            first_s = took_s(lambda x, weight: F.linear(x, expand(weight, kind)), xs, parts)
            note = f"{torch_s / own_s:.2f} times as fast as bf16; {torch_s / first_s:.2f} if expanded first"
            rate = sum(part.nbytes for part in parts) / own_s / 1e9
            step.figure(f"linears of {rows} rows, {name}", rate, "GB/s", note)


def rounded_linears(step: Step) -> None:
    """Measure the same linears with rows and weights in FP8, the time to round the rows included."""
    from gpu.steps.kernels import e4m3_of
    from octavo_engine.ops.triton.fp8_linear import DEPTH, fp8_linear, prepare_fp8
    from octavo_testing.group_cases import random_group_tensor

    kind, shapes = torch.bfloat16 if step.is_gpu else torch.float16, LINEARS[step.device]
    with e4m3_of(step):
        for rows in (16, 4096) if step.is_gpu else (2,):
            xs = [torch.randn(rows, size, device=step.device).to(kind) for _, size in shapes]
            plain = [torch.randn(shape, device=step.device).to(kind) for shape in shapes]
            torch_s = replayed_s(lambda xs=xs, plain=plain: [*map(F.linear, xs, plain)], step)
            work = 2 * rows * sum(out * size for out, size in shapes) / 1e12
            step.figure(f"linears of {rows} rows by torch", work / torch_s, "TFLOP/s", f"{1e6 * torch_s:.0f} us")
            for name, scale, group in (("scales of rows", None, 0), ("static", 0.01, 0), ("groups", None, DEPTH)):
                given = [random_group_tensor("e4m3", *each, group or each[1], device=step.device) for each in shapes]
                parts = [prepare_fp8(weight, None, kind, scale) for weight in given]
                own_s = replayed_s(lambda xs=xs, parts=parts: [*map(fp8_linear, xs, parts)], step)
                taken = sum(part.has_product for part in parts)
                note = f"{torch_s / own_s:.2f} times as fast; torch's _scaled_mm takes {taken} of {len(parts)}"
                step.figure(f"linears of {rows} rows in FP8, {name}", work / own_s, "TFLOP/s", note)


def experts(step: Step) -> None:
    """Measure the products of the experts of Qwen3-30B-A3B beside the time to read those that have rows."""
    from octavo_engine.ops.triton.expert_linear import choose_tile
    from octavo_testing.expert_cases import ExpertCase

    shape = {"size": 2048, "inner": 768, "experts": 128} if step.is_gpu else {}
    for rows in (1, 16, 64, 256, 2048) if step.is_gpu else (1,):
        case = ExpertCase.make(rows, 8, **shape).to(torch.bfloat16 if step.is_gpu else torch.float16, step.device)
        took = replayed_s(partial(case.compute, choose_tile(case.numbers.numel(), len(case.down))), step)
        busy = len(case.numbers.unique()) / len(case.down)
        floor = busy * (case.gate_up.nbytes + case.down.nbytes) / bandwidth(step)
        step.figure(f"experts of {rows} rows", 1e6 * took, "us", f"reading the weights takes {1e6 * floor:.0f} us")


def loads_of(name: str) -> list[tuple[str, Sizes, list[str]]]:
    """Return titles, sizes and kinds of sampling of the loads of a model."""
    if name.startswith("tiny"):
        return [("4 streams", [(20, 8)] * 4, [*KINDS])]
    draw = random.Random(0)
    crowd = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256)]
    streams = [(f"{n} streams of 1024 + 64", [(1024, 64)] * n, [*KINDS][: 2 if n == 32 else 1]) for n in (1, 32, 256)]
    return [*streams, ("256 x U(100, 1024) in and out", crowd, [*KINDS])] if name == "Qwen3-0.6B" else streams[:2]


def floor_s(step: Step, name: str, sizes: Sizes, weights_bytes: int) -> float:
    """Return the seconds to read weights and KV at the copy's bandwidth and to multiply prompts at the GEMM's rate."""
    model = SHAPES[name]
    kv_bytes = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * 2
    steps = max(num_out for _, num_out in sizes)
    read = steps * weights_bytes + sum(kv_bytes * (n_in * n_out + n_out**2 // 2) for n_in, n_out in sizes)
    flops = weights_bytes * sum(num_in for num_in, _ in sizes)  # two a weight, of two bytes
    return read / bandwidth(step) + flops / (1e12 * (step.measured("bf16 GEMM") or 700.0))


def engine(step: Step, name: str) -> None:
    """Measure an engine under its loads, beside their floors, and the memory that its steps take."""
    began, vocab = time.perf_counter(), SHAPES[name]["vocab_size"]
    core, ready = open_engine(name, step.work, device=step.device, **SETTINGS[step.device])
    about = f"{ready.startup_s}; {ready.num_blocks} blocks, max_model_len {ready.max_model_len}"
    step.figure(f"{name}: start without imports", time.perf_counter() - began, "s", about)
    generate(core, [(8, 4)] * 2, vocab, **SAMPLED)
    for title, sizes, kinds in loads_of(name):
        floor = sum(num_out for _, num_out in sizes) / floor_s(step, name, sizes, ready.weights_bytes)
        for kind in kinds:
            first, limit_s = core.stats().steps, min(LOAD_S, step.seconds_left() - 5)
            outputs, took = generate(core, sizes, vocab, most_s=limit_s, **KINDS[kind])
            count, steps = sum(map(len, outputs)), core.stats().steps - first
            if core.has_work():
                error = TimeoutError if limit_s == LOAD_S else LeftOut
                raise error(f"{title}, {kind}: stopped after {took:.0f} s with {count} tokens")
            note = f"floor {floor:.0f} tok/s: {100 * count / took / floor:.3g} %; {1e3 * took / steps:.2f} ms a step"
            step.figure(f"{name} {title}, {kind}", count / took, "tok/s", note)
    report_memory(step, name, ready)
    core.shutdown()


def report_memory(step: Step, name: str, ready: Any) -> None:
    """Compare the memory that torch took beside weights and KV cache with the plan of it."""
    from octavo_engine.devices.cuda_device import step_bytes
    from octavo_engine.settings.config import EngineConfig
    from octavo_engine.sources.model_config import load_model_config
    from octavo_engine.sources.model_files import ModelFiles

    files = ModelFiles(name=name, root=Path(), load_format="dummy", config=SHAPES[name])
    planned = step_bytes(EngineConfig(model=name, max_num_seqs=256), load_model_config(files), torch.bfloat16) / 2**20
    step.figure(f"{name}: memory planned beside weights and KV cache", planned, "MiB")
    if step.is_gpu:
        peak, most = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated() / 2**20
        used = (peak - ready.weights_bytes - ready.kv_bytes) / 2**20
        note = f"reserved {peak / 2**20:.0f} MiB, allocated {most:.0f}"
        step.check(f"{name}: memory used beside weights and KV cache", used <= planned, used, "MiB", note)


def profile(step: Step) -> None:
    """Measure decode steps, and profile some. Without a GPU, operators of torch stand for its kernels and copies."""
    name, num_in, num_steps = MODEL[step.device], 512 if step.is_gpu else 20, 15
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.is_gpu else [])]
    kind = DeviceType.CUDA if step.is_gpu else DeviceType.CPU
    clock = "self_device_time_total" if step.is_gpu else "self_cpu_time_total"
    core, _ = open_engine(name, step.work, device=step.device, **SETTINGS[step.device])
    for streams in (1, 32, 256) if step.is_gpu else (4,):
        start_decoding(core, [(num_in, 64)] * streams, SHAPES[name]["vocab_size"])
        began = time.perf_counter()
        for _ in range(num_steps):
            core.step()
        step_us = 1e6 * (time.perf_counter() - began) / num_steps
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(num_steps):
                core.step()
        events: Any = profiler.key_averages()
        work = [each for each in events if each.device_type == kind]
        took = sorted(((getattr(each, clock) / num_steps, each.key) for each in work), reverse=True)
        count = sum(each.count for each in work) / num_steps
        calls = sum(each.count for each in events if each.key.startswith(HOST_CALLS)) / num_steps
        note = f"{count:.0f} kernels and copies, started by {calls:.0f} calls"
        step.figure(f"{streams} streams: a decode step", step_us / 1e3, "ms", note)
        idle = 1 - sum(microseconds for microseconds, _ in took) / step_us
        step.figure(f"{streams} streams: the GPU idles", 100 * idle, "% of a step")
        for microseconds, kernel in took[: 6 if streams == 1 else 10]:
            step.figure(f"{streams} streams: {kernel[:60]}", microseconds, "us a step")
        while core.has_work():
            core.step()
    core.shutdown()


def peer(step: Step, name: str, python: Path) -> None:
    """Run the loads of the first model in another engine, which prints a line of JSON for each."""
    model = MODEL[step.device]
    plans = [(f"{title}, {kind}", sizes, KINDS[kind]) for title, sizes, kinds in loads_of(model) for kind in kinds]
    script = Path(__file__).parents[2] / "engines" / "gpu_peer.py"
    command = [str(python), str(script), name, str(write_config(model, step.work)), json.dumps(plans)]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # it has packages of the engine
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as other:
        timer = threading.Timer(min(step.seconds_left() - 3, CASE_S - 5), other.kill)
        timer.start()
        for line in other.stdout or ():
            if line.startswith('["'):
                title, rate = json.loads(line)
                step.figure(f"{model} {title}: {name}", rate, "tok/s")
        timer.cancel()
    if other.returncode:
        raise subprocess.CalledProcessError(other.returncode, command[:3])


def cases_of(step: Step) -> Mapping[str, Case]:
    """Return the cases in the order of their worth; Llama-3-8B is last, as it takes longest."""
    cases: dict[str, Case] = {"sampling": sampling, "decode attention": decode_attention}
    cases["fp8 cache"] = coded_attention
    cases |= {"linears": linears, "fp8 linears": rounded_linears, "experts": experts}
    cases |= {"engine": partial(engine, name=MODEL[step.device]), "profile": profile}
    cases["prompt attention"] = prompt_attention
    if peers := os.environ.get("OCTAVO_GPU_PEERS"):
        places = {name: Path(peers, name, "bin/python") for name in PEERS}
        cases |= {name: partial(peer, name=name, python=path) for name, path in places.items() if path.exists()}
    return cases | ({"8B": partial(engine, name="Llama-3-8B")} if step.is_gpu else {})


if __name__ == "__main__":
    this = parse_step("speed")
    run_cases(this, cases_of(this), case_s=CASE_S)
