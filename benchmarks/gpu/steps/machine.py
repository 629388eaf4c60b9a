"""Properties of the machine, and its ceilings: a copy, and a matrix product of bf16."""

import importlib
import os
import platform
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import torch
from gpu.step import Case, Step, parse_step, run_cases
from gpu.timing import median_s

PACKAGES = ("msgspec", "zmq", "llguidance", "fastapi", "uvicorn", "httptools", "pydantic", "gguf", "shtab", "uvloop")
OWN = (
    "octavo_engine.offline.llm",
    "octavo_engine.devices.cuda_device",
    "octavo_server.cli.main",
    "octavo_testing.tiny_models",
)
PINNED_BYTES = 1 << 28


def versions(step: Step) -> None:
    import triton

    step.figure("python, torch, triton", f"{platform.python_version()}, {torch.__version__}, {triton.__version__}")
    step.figure("processors, kernel", f"{os.cpu_count()}, {platform.release()}")


def compiler(step: Step) -> None:
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    program = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    found = program is not None and header.exists()
    step.check("C compiler and Python.h, for Triton's launcher", found or not step.is_gpu, note=f"{program}, {header}")


def import_module(step: Step, module: str) -> None:
    importlib.import_module(module)
    step.check(f"import {module}", True)


def own_check(step: Step) -> None:
    from octavo_engine.devices.cuda_device import find_cuda_problem

    problem = find_cuda_problem()
    step.check("the engine's own check of the GPU", (problem is None) == step.is_gpu, note=problem or "")


def gpu(step: Step) -> None:
    about, free = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()[0]
    memory = f"{free / 2**30:.1f} of {about.total_memory / 2**30:.1f} GiB are free"
    note = f"{memory}; {about.multi_processor_count} processors; {torch.cuda.device_count()} GPUs"
    step.figure("GPU", f"{about.name}, sm_{about.major}{about.minor}", note=note)
    host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    for name, copy in (("to", partial(device.copy_, host)), ("from", partial(host.copy_, device))):
        took = median_s(partial(copy, non_blocking=True), "cuda", most_s=0.2)
        step.figure(f"pinned copy {name} the GPU", PINNED_BYTES / took / 1e9, "GB/s")
    tiny, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiny += 1
    graph.replay()
    step.check("a CUDA graph replays", tiny.item() == 1)
    step.figure("launch of an empty kernel", 1e6 * median_s(lambda: tiny.add_(1), "cuda", most_s=0.05), "us")


def ceilings(step: Step) -> None:
    size, rows = (1 << 32, 8192) if step.is_gpu else (1 << 24, 256)
    source = torch.randint(0, 255, (size // 4,), dtype=torch.int32, device=step.device)
    took = median_s(partial(torch.empty_like(source).copy_, source), step.device)
    step.figure("copy bandwidth", 2 * size / took / 1e9, "GB/s")
    a, b = (torch.randn(rows, rows, device=step.device).to(torch.bfloat16) for _ in range(2))
    step.figure("bf16 GEMM", 2 * rows**3 / median_s(lambda: a @ b, step.device) / 1e12, "TFLOP/s")


def cases(step: Step) -> dict[str, Case]:
    first: dict[str, Case] = {"versions": versions, "compiler": compiler, "own check": own_check}
    imports = {f"import {module}": partial(import_module, module=module) for module in (*PACKAGES, *OWN)}
    return first | ({"GPU": gpu} if step.is_gpu else {}) | {"ceilings": ceilings} | imports


if __name__ == "__main__":
    this = parse_step("machine")
    run_cases(this, cases(this), case_s=40.0 if this.is_gpu else 250.0)
