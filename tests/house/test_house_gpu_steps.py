"""Parts of the steps of `benchmarks/gpu`: what they import, how tokens are compared, and torch's attention."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in [name for name in sys.modules if name == "gpu" or name.startswith("gpu.")]:
        monkeypatch.delitem(sys.modules, name)


def causal(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    """Compute the attention of [tokens, heads, size]; unequal numbers of heads need `enable_gqa`."""
    heads_first = [each.transpose(0, 1)[None] for each in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads_first, is_causal=True, **more)[0].transpose(0, 1)


def torch_2_11(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, n: int, m: int, *, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    assert window_size == (-1, 0)
    return causal(q, k, v)


def torch_2_13(
    q: Tensor, k: Tensor, v: Tensor, *rest: object, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False
) -> Tensor:
    assert window_size == (-1, 0)
    return causal(q, k, v, enable_gqa=enable_gqa)


@pytest.mark.parametrize("varlen", [torch_2_11, torch_2_13, None], ids=["2.11", "2.13", "none"])
def test_attention_of_each_version_of_torch_is_causal_over_shared_heads(varlen: Callable[..., Tensor] | None) -> None:
    from gpu.steps.speed import HEAD_DIM, HEADS, KV_HEADS, peer_attention

    q, k, v = (torch.randn(7, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = peer_attention(varlen, q, k, v)()
    found = found[0].transpose(0, 1) if varlen is None else found
    torch.testing.assert_close(found, causal(q, k, v, enable_gqa=True))


def output(tokens: list[int], gap: float = 0.0) -> SimpleNamespace:
    """Return an output whose tokens 7 and 8 are `gap` apart at each place."""
    near = {7: SimpleNamespace(logprob=-1.0), 8: SimpleNamespace(logprob=-1.0 - gap)}
    return SimpleNamespace(token_ids=tokens, finish_reason="length", logprobs=[near] * len(tokens))


@pytest.mark.parametrize(
    ("found", "wanted", "gap"),
    [
        ([7, 8], output([7, 8]), None),
        ([7, 8], output([7, 7], 0.001), 0.001),
        ([7, 8], output([7, 7], 0.5), 0.5),
        ([7, 9], output([7, 7], 0.001), float("inf")),  # 9 is not among the most likely
        ([7], output([7, 7]), float("inf")),
        ([], output([]), float("inf")),  # a request that failed
    ],
)
def test_the_first_token_that_differs_decides(found: list[int], wanted: Any, gap: float | None) -> None:
    from gpu.steps.tokens import first_gap

    difference = first_gap(output(found), wanted)
    assert (None if difference is None else difference[0]) == (gap if gap is None else pytest.approx(gap))


#: Runs a step's module as the driver does, without its cases. The calls of torch and Triton that start CUDA raise.
TRAPPED = """
import runpy, sys, torch
from triton.runtime import driver

def boom(*arguments, **options):
    raise RuntimeError("the process of the step has started CUDA")

torch.cuda._is_compiled = lambda: True
torch.cuda._lazy_init = torch._C._cuda_getDeviceCount = torch.cuda._device_count_nvml = boom
type(driver).active = property(boom)
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


def run_trapped(module: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    root = BENCHMARKS.parent
    paths = (BENCHMARKS, root / "engine/src", root / "server/src", root / "tests/support", folder)
    env = os.environ | {"PYTHONPATH": ":".join(map(str, paths)), "OCTAVO_GPU_WORK": str(folder)}
    command = [sys.executable, "-c", TRAPPED, module, str(folder), "--device", "cuda", "--match", "^$"]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


@pytest.mark.parametrize("step", ["machine", "kernels", "tokens", "serve", "speed", "ranks"])
def test_the_process_of_a_step_starts_no_cuda_before_it_forks(step: str, tmp_path: Path) -> None:
    done = run_trapped(f"gpu.steps.{step}", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "fault", ["torch.cuda.is_available()", "torch.zeros(1, device='cuda')", "triton.runtime.driver.active.get_device()"]
)
def test_a_step_that_starts_cuda_is_noticed(fault: str, tmp_path: Path) -> None:
    (tmp_path / "faulty_step.py").write_text(f"import torch, triton\n{fault}\n")
    done = run_trapped("faulty_step", tmp_path)
    assert done.returncode == 1
    assert "has started CUDA" in done.stderr
