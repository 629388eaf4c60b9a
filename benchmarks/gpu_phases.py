"""Phases of `gpu.sh`: machine, kernels and tokens, attention, throughput, vLLM's, a profile, two GPUs; and their table.

`--device cpu` runs what needs no GPU in small sizes, which checks this script, not the engine's speed.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu.decode_profile import profile_steps
from gpu.dummy_models import SHAPES, generate, open_engine, start_decoding, write_config
from octavo_engine.ops.attention import AttentionBatch, AttentionSpec, LayerKVSpec
from octavo_engine.ops.reference import ReferenceBackend
from octavo_engine.runner.cuda_device import CudaDevice
from table import number, print_table

BLOCK = 16
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PEER = Path(__file__).with_name("engines") / "vllm_gpu.py"
Rows = Iterator[tuple[str, float, str]]  # figure, value, unit


def seconds(work: Callable[[], object], device: str, repetitions: int = 10) -> float:
    """Return the seconds of one call, after a call that compiles."""
    work()
    wait(device)
    began = time.perf_counter()
    for _ in range(repetitions):
        work()
    wait(device)
    return (time.perf_counter() - began) / repetitions


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_machine(folder: Path, device: str) -> Rows:
    size, rows = (1 << 30, 8192) if device == "cuda" else (1 << 22, 128)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield "copy bandwidth", 2 * size / seconds(lambda: target.copy_(source), device) / 1e9, "GB/s"
    matrix = torch.ones(rows, rows, dtype=torch.bfloat16, device=device)
    yield "bf16 GEMM", 2 * rows**3 / seconds(lambda: matrix @ matrix, device) / 1e12, "TFLOP/s"


def check_kernels(folder: Path, device: str) -> Rows:
    if device == "cuda":
        for dtype, tolerance in TOLERANCES.items():
            for lengths, queries in (([1, 17, 200, 1024], 1), ([5, 64, 333], 5), ([700], 700)):
                error = largest_error(lengths, queries, dtype)
                name = f"{str(dtype).removeprefix('torch.')} {len(lengths)} x {queries} queries: error"
                yield name, error, "ok" if error <= tolerance else f"ABOVE {tolerance:g}"
    for name in ("tiny-llama", "tiny-qwen3", "tiny-gemma2"):
        sizes = [(n, 16) for n in (3, 40, 100)]
        found = tokens_of(name, folder, sizes, device)
        kinds: tuple[tuple[str, dict[str, Any]], ...] = (
            ("the CPU's", {"device": "cpu"}),
            ("eager steps'", {"enforce_eager": True}),
            ("those of the other scheduling", {"async_scheduling": device != "cuda"}),  # the default: on a GPU
        )
        for kind, settings in kinds:
            others = tokens_of(name, folder, sizes, **{"device": device, **settings})
            equal = sum(a == b for a, b in zip(found, others, strict=True))
            yield f"{name}: outputs equal to {kind}", equal, "ok" if equal == len(sizes) else f"OF {len(sizes)}"


def tokens_of(name: str, folder: Path, sizes: list[tuple[int, int]], device: str, **more: Any) -> list[list[int]]:
    settings = {"dtype": "float32", "device": device, "num_gpu_blocks_override": 100, "max_model_len": 256}
    core, _ = open_engine(name, folder, **settings, **more)
    try:
        return generate(core, sizes, SHAPES[name]["vocab_size"])[0]
    finally:
        core.shutdown()


def largest_error(lengths: list[int], queries: int, dtype: torch.dtype) -> float:
    kv = LayerKVSpec(num_kv_heads=2, head_dim=128)
    spec = AttentionSpec(layer_idx=0, num_heads=8, kv=kv, scale=128**-0.5)
    results = []
    for backend in (CudaDevice().attention_backend([kv], BLOCK, dtype), ReferenceBackend([kv], BLOCK, dtype, "cuda")):
        generator = torch.Generator("cuda").manual_seed(0)
        backend.allocate(sum(-(-n // BLOCK) for n in lengths))

        def values(rows: int, heads: int, source: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(rows, heads, 128, generator=source, device="cuda", dtype=dtype)

        for step in (batch_of(lengths, lengths), batch_of(lengths, [min(queries, n) for n in lengths])):
            rows = len(step.slots)
            backend.begin_step(step)
            q, k, v = values(rows, 8), values(rows, 2), values(rows, 2)
            results.append(backend.attend(spec, q, k, v, step).float())
    half = len(results) // 2
    return max(float((a - b).abs().max()) for a, b in zip(results[:half], results[half:], strict=True))


def batch_of(lengths: list[int], queries: list[int]) -> AttentionBatch:
    """Build a step that computes the last `queries` tokens of sequences whose blocks follow each other."""
    first, tables, slots, positions = 0, [], [], []
    width = max(-(-n // BLOCK) for n in lengths)
    for length, new in zip(lengths, queries, strict=True):
        count = -(-length // BLOCK)
        tables.append([*range(first, first + count), *[0] * (width - count)])
        slots += range(first * BLOCK + length - new, first * BLOCK + length)
        positions += range(length - new, length)
        first += count
    starts = torch.tensor([0, *queries]).cumsum(0)
    return AttentionBatch(
        query_start=starts.to("cuda", torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        block_tables=torch.tensor(tables, dtype=torch.int32, device="cuda"),
        slots=torch.tensor(slots, device="cuda"),
        positions=torch.tensor(positions, device="cuda"),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        num_keys=sum(lengths),
    )


def measure_attention(folder: Path, device: str) -> Rows:
    if device != "cuda":
        return
    kv = LayerKVSpec(num_kv_heads=8, head_dim=128)
    spec = AttentionSpec(layer_idx=0, num_heads=16, kv=kv, scale=128**-0.5)
    backend = CudaDevice().attention_backend([kv], BLOCK, torch.bfloat16)
    bandwidth = 1e9 * figure_of(folder, "copy bandwidth")

    def timed(seqs: int, length: int, queries: int) -> float:
        backend.allocate(seqs * -(-length // BLOCK))
        step = batch_of([length] * seqs, [queries] * seqs)
        backend.begin_step(step)
        q, k, v = (torch.randn(seqs * queries, n, 128, device="cuda", dtype=torch.bfloat16) for n in (16, 8, 8))
        return seconds(lambda: backend.attend(spec, q, k, v, step), device)

    for seqs, length in ((256, 1024), (8, 8192), (1, 32768)):
        share = seqs * length * 2 * 8 * 128 * 2 / bandwidth / timed(seqs, length, 1)
        yield f"decode {seqs} x {length}: share of bandwidth", 100 * share, "%"
    own = timed(1, 8192, 8192)
    yield "prefill 8192", 1e3 * own, "ms"
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (torch.randn(8192, n, 128, device="cuda", dtype=torch.bfloat16) for n in (16, 8, 8))
    ends = torch.tensor([0, 8192], dtype=torch.int32, device="cuda")
    causal = {"window_size": (-1, 0), "enable_gqa": True}
    peer = seconds(lambda: varlen_attn(q, k, v, ends, ends, 8192, 8192, **causal), device)
    yield "prefill 8192 by varlen_attn", 1e3 * peer, "ms"


def plans_of(device: str) -> list[tuple[str, list[tuple[str, list[tuple[int, int]]]]]]:
    """Return the loads of each model: titles, and the (prompt tokens, output tokens) of requests that start at once."""
    if device != "cuda":
        return [("tiny-llama", [("4 requests", [(20, 8)] * 4)])]
    draw = random.Random(0)
    crowd = [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(256)]
    streams = [(f"{n} streams", [(1024, 64)] * n) for n in (1, 32, 256)]
    return [("Qwen3-0.6B", [("256 requests", crowd), *streams]), ("Llama-3-8B", streams[:2])]


def measure_engine(folder: Path, device: str) -> Rows:
    for name, loads in plans_of(device):
        settings = {} if device == "cuda" else {"num_gpu_blocks_override": 100, "max_model_len": 256}
        core, ready = open_engine(name, folder, device=device, dtype="bfloat16", **settings)
        for title, sizes in loads:
            _, took = generate(core, sizes, SHAPES[name]["vocab_size"])
            tokens = sum(num_out for _, num_out in sizes)
            yield f"{name} {title}", tokens / took, "tok/s"
            yield f"{name} {title}: floor", tokens / floor_s(folder, name, sizes, ready.weights_bytes), "tok/s"
        core.shutdown()


def measure_vllm(folder: Path, device: str) -> Rows:
    """Run the first model's loads of phase 3 in vLLM. Raises CalledProcessError if it fails; its output says why."""
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        return
    name, loads = plans_of(device)[0]
    command = [python, str(PEER), str(write_config(name, folder)), json.dumps(loads)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it has packages of the engine
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as vllm:
        for line in vllm.stdout or ():
            if line.startswith("["):
                title, rate = json.loads(line)
                yield f"{name} {title}: vLLM", rate, "tok/s"
    if vllm.returncode:
        raise subprocess.CalledProcessError(vllm.returncode, command[:2])


def profile_decodes(folder: Path, device: str) -> Rows:
    """Profile 20 decode steps of the first model of phase 3, after some that warm up."""
    name, _ = plans_of(device)[0]
    for num_streams in (1, 32) if device == "cuda" else (4,):
        settings = {} if device == "cuda" else {"num_gpu_blocks_override": 100, "max_model_len": 256}
        core, _ = open_engine(name, folder, device=device, dtype="bfloat16", **settings)
        num_in = 1024 if device == "cuda" else 20
        start_decoding(core, [(num_in, 64)] * num_streams, SHAPES[name]["vocab_size"])
        for _ in range(5):
            core.step()
        found = profile_steps(core, device, 20)
        core.shutdown()
        title = f"{name} {num_streams} streams"
        yield f"{title}: kernels and copies in a step", len(found.work) / found.num_steps, ""
        yield f"{title}: calls that start them", found.num_calls / found.num_steps, ""
        yield f"{title}: the GPU idles", 100 * found.idle_share(), "%"
        for kernel, microseconds in found.longest(10):
            yield f"{title}: {kernel}", microseconds, "us"


def check_ranks(folder: Path, device: str) -> Rows:
    """Compare two ranks with one, on two GPUs or, on a CPU, with a thread each."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        yield "skipped, as it needs two GPUs; GPUs", torch.cuda.device_count(), ""
        return
    sizes = [(n, 16) for n in (3, 40, 100)]
    one = tokens_of("tiny-llama", folder, sizes, device)
    two = tokens_of("tiny-llama", folder, sizes, device, tensor_parallel_size=2, num_threads=2)
    equal = sum(a == b for a, b in zip(one, two, strict=True))
    yield "tiny-llama on 2 ranks: outputs equal to one rank's", equal, "ok" if equal == 3 else "OF 3"
    for name, loads in plans_of(device):
        settings = {} if device == "cuda" else {"num_gpu_blocks_override": 100, "max_model_len": 256}
        for ranks in (1, 2):
            settings |= {"tensor_parallel_size": ranks, "num_threads": 2}
            core, _ = open_engine(name, folder, device=device, dtype="bfloat16", **settings)
            for title, sizes in loads:
                generate(core, sizes[:1], SHAPES[name]["vocab_size"])
                _, took = generate(core, sizes, SHAPES[name]["vocab_size"])
                yield f"{name} {title}: {ranks} ranks", sum(num_out for _, num_out in sizes) / took, "tok/s"
            core.shutdown()


def floor_s(folder: Path, name: str, sizes: list[tuple[int, int]], weights_bytes: int) -> float:
    """Return the seconds to read weights and KV at the measured bandwidth and to multiply prompts at the GEMM rate."""
    model = SHAPES[name]
    kv_bytes = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * 2
    steps = max(num_out for _, num_out in sizes)
    read = steps * weights_bytes + sum(kv_bytes * (n_in * n_out + n_out**2 // 2) for n_in, n_out in sizes)
    flops = weights_bytes * sum(num_in for num_in, _ in sizes)  # two a weight, of two bytes
    return read / (1e9 * figure_of(folder, "copy bandwidth")) + flops / (1e12 * figure_of(folder, "bf16 GEMM"))


PHASES = {
    "0": measure_machine,
    "1": check_kernels,
    "2": measure_attention,
    "3": measure_engine,
    "4": measure_vllm,
    "5": profile_decodes,
    "6": check_ranks,
}


def figure_of(folder: Path, name: str) -> float:
    machine = folder / "phase-0.json"
    if not machine.exists():
        sys.exit(f"{machine} is missing: run phase 0 first.")
    rows = json.loads(machine.read_text())["rows"]
    return float(next(value for figure, value, _ in rows if figure == name))


def run(phase: str, folder: Path, device: str) -> int:
    """Run a phase; save each figure as soon as it is measured, under the phase's own name once it is complete."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "gpu": gpu}
    found: dict[str, Any] = {"versions": versions, "date": time.strftime("%Y-%m-%d"), "rows": []}
    partial = folder / f"phase-{phase}.partial.json"
    with torch.inference_mode():
        for row in PHASES[phase](folder, device):
            found["rows"].append(row)
            partial.write_text(json.dumps(found, indent=1))
    partial.write_text(json.dumps(found, indent=1))
    partial.rename(folder / f"phase-{phase}.json")
    return 1 if any(unit.startswith(("ABOVE", "OF")) for _, _, unit in found["rows"]) else 0


def show(folder: Path) -> int:
    rows, about = [], ""
    for phase in PHASES:
        path = folder / f"phase-{phase}.json"
        partial = folder / f"phase-{phase}.partial.json"
        if not path.exists() and not partial.exists():
            rows.append((f"{phase} not run", "", ""))
            continue
        found = json.loads((path if path.exists() else partial).read_text())
        about = f"{found['versions']['gpu']}, torch {found['versions']['torch']}, {found['date']}"
        rows += [(f"{phase} {name}", number(value), unit) for name, value, unit in found["rows"]]
        rows += [] if path.exists() else [(f"{phase} incomplete", "", "")]
    print_table(about or "no phase has run", ("phase, figure", "value", "unit"), rows)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=[*PHASES, "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    return show(args.folder) if args.phase == "table" else run(args.phase, args.folder, args.device)


if __name__ == "__main__":
    sys.exit(main())
