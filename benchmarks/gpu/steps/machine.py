"""Properties of the machine, and its ceilings: a copy, and a matrix product of bf16."""

import importlib
import os
import platform
import shutil
import sys
import sysconfig
from functools import partial
from pathlib import Path

from gpu.case_pool import Case, run_cases
from gpu.step import Step

PACKAGES = ("msgspec", "zmq", "llguidance", "fastapi", "uvicorn", "httptools", "pydantic", "gguf", "shtab", "uvloop")
OWN = ("octavo_engine.llm", "octavo_engine.runner.cuda_device", "octavo_server.cli.main", "octavo_testing.tiny_models")
PINNED_BYTES = 1 << 28


def versions(step: Step) -> None:
    import torch
    import triton

    step.figure("python, torch, triton", f"{platform.python_version()}, {torch.__version__}, {triton.__version__}")
    step.figure("processors, kernel", f"{os.cpu_count()}, {platform.release()}")


def compiler(step: Step) -> None:
    """Check what Triton compiles its launcher with."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    program = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    step.check("Python.h, which Triton's launcher needs", header.exists() or not step.is_gpu, note=str(header))
    step.check("C compiler, which Triton's launcher needs", bool(program) or not step.is_gpu, note=str(program))


def importing(module: str) -> Case:
    def run(step: Step) -> None:
        importlib.import_module(module)
        step.check(f"import {module}", True)

    return run


def own_check(step: Step) -> None:
    from octavo_engine.runner.cuda_device import find_cuda_problem

    problem = find_cuda_problem()
    step.check("the engine's own check of the GPU", (problem is None) == step.is_gpu, note=problem or "")


def gpu(step: Step) -> None:
    import torch
    from gpu.timing import median_s

    about = torch.cuda.get_device_properties(0)
    memory = f"{about.total_memory / 2**30:.1f} GiB, {about.multi_processor_count} processors"
    step.figure("GPU", about.name, note=f"{memory}; GPUs: {torch.cuda.device_count()}")
    own, known = "sm_{}{}".format(*torch.cuda.get_device_capability()), torch.cuda.get_arch_list()
    step.check("the GPU's architecture is one of torch's", own in known, own, note=" ".join(known))
    step.figure("free memory", torch.cuda.mem_get_info()[0] / 2**30, "GiB")
    host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    for name, copy in (("to", partial(device.copy_, host)), ("from", partial(host.copy_, device))):
        took = median_s(partial(copy, non_blocking=True), "cuda", most_s=0.2)
        step.figure(f"pinned copy {name} the GPU", PINNED_BYTES / took / 1e9, "GB/s")
    tiny = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiny += 1
    graph.replay()
    step.check("a CUDA graph replays", tiny.item() == 1)
    step.figure("launch of an empty kernel", 1e6 * median_s(lambda: tiny.add_(1), "cuda", most_s=0.05), "us")


def ceilings(step: Step) -> None:
    import torch
    from gpu.timing import median_s

    size, rows = (1 << 32, 8192) if step.is_gpu else (1 << 24, 256)
    source = torch.randint(0, 255, (size // 4,), dtype=torch.int32, device=step.device)
    took = median_s(partial(torch.empty_like(source).copy_, source), step.device)
    step.figure("copy bandwidth", 2 * size / took / 1e9, "GB/s")
    a, b = (torch.randn(rows, rows, device=step.device).to(torch.bfloat16) for _ in range(2))
    step.figure("bf16 GEMM", 2 * rows**3 / median_s(lambda: a @ b, step.device) / 1e12, "TFLOP/s")


def cases(step: Step) -> dict[str, Case]:
    imports = {f"import {module}": importing(module) for module in (*PACKAGES, *OWN)}
    first: dict[str, Case] = {"versions": versions, "compiler": compiler, **imports, "own check": own_check}
    return first | ({"GPU": gpu} if step.is_gpu else {}) | {"ceilings": ceilings}


if __name__ == "__main__":
    sys.exit(run_cases("machine", cases, workers=lambda step: 1, case_s=lambda step: 40.0))
