"""CPU time of an eager forward pass for a GPU, as in steps outside CUDA graphs, measured without a GPU.

Kernels are compiled for sm_90, and launched by Triton's own code up to the call of the driver, which does nothing.
torch's operators run on `meta`, where two take far longer than on a GPU, as they are written in Python there: `linear`
13 us and `empty_like` 19 us. An allocation of their outputs, 3 us, stands for them. Figures are CPU time of the thread,
as machines are shared; the first of two columns includes the launches.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import support_path  # noqa: F401  (makes octavo_testing importable)
import torch
from octavo_testing import gpu_compiler
from table import Samples, print_table, save_json

KINDS: dict[str, dict[str, int]] = {
    "64 decodes": {"seqs": 64, "tokens": 64, "max_query_len": 1, "table_width": 64},
    "64 decodes, prompt of 512": {"seqs": 65, "tokens": 576, "max_query_len": 512, "table_width": 64},
}
#: Architecture, and its differences from transformers' defaults.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": (
        "Qwen3ForCausalLM",
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "tie_word_embeddings": True},
    ),
    "Llama-3-8B": ("LlamaForCausalLM", {"intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}),
}


def milliseconds(work: Callable[[], object], repetitions: int) -> Samples:
    for _ in range(3):
        work()
    times = []
    for _ in range(repetitions):
        began = time.thread_time()
        work()
        times.append(1e3 * (time.thread_time() - began))
    return Samples(tuple(times))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)


def empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def launch_nothing(kernel_class: type) -> None:
    """Let the last part of a launch, which calls the driver, do nothing."""

    def no_handles(self: Any) -> None:
        self.module = self.function = 1
        self._run = lambda *arguments: None

    kernel_class._init_handles = no_handles  # type: ignore[attr-defined]


def measure(name: str, repetitions: int) -> dict[str, tuple[Samples, Samples, int]]:
    """Return, for each kind of step, its time, its time without launches, and the number of launches."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    architecture, differences = MODELS[name]
    model_type, shape = gpu_compiler.MODELS[architecture]
    gpu_compiler.MODELS[architecture] = (model_type, {**shape, **differences})
    launch, launches = JITFunction.run, list[None]()
    gpu_compiler.record_compilations(90)
    steps = gpu_compiler.MetaSteps(architecture, torch.bfloat16, sm=90)
    for sizes in KINDS.values():
        steps.run(**sizes)
    launch_nothing(CompiledKernel)
    torch.nn.functional.linear, torch.empty_like = linear, empty_like  # type: ignore[assignment]
    found = {}
    for kind, sizes in KINDS.items():
        step = partial(steps.run, **sizes)
        JITFunction.run = lambda *arguments, **options: launches.append(None)
        launches.clear()
        step()
        num_launches, without = len(launches), milliseconds(step, repetitions)
        JITFunction.run = launch
        found[kind] = milliseconds(step, repetitions), without, num_launches
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the milliseconds of CPU time of a GPU's eager steps.")
    parser.add_argument("--model", choices=MODELS, default="Qwen3-0.6B", help="shape of the model. Default: Qwen3-0.6B")
    parser.add_argument("--repetitions", type=int, default=15, help="steps of each kind. Default: 15")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_CACHE_DIR", str(gpu_compiler.CACHE))
    torch.set_num_threads(1)
    from octavo_engine.ops import triton_devices

    triton_devices.DEVICES.add("meta")
    found = measure(arguments.model, arguments.repetitions)
    cells = [(kind, step, without, launches) for kind, (step, without, launches) in found.items()]
    title = f"CPU time of an eager step of {arguments.model}"
    print_table(title, ("step", "all, ms", "without launches, ms", "launches"), cells)
    save_json(arguments.json, {kind: {"step": step, "without": without} for kind, (step, without, _) in found.items()})


if __name__ == "__main__":
    main()
