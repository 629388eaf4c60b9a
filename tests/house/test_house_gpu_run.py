"""`benchmarks/gpu/run` on the CPU in small sizes: all steps, and faults that are planted in a copy of the kernels."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"PYTHON": sys.executable}
SOURCES = (
    "engine/src",
    "server/src",
    "tests/support",
    "benchmarks",
    "engine/pyproject.toml",
    "server/pyproject.toml",
)
#: Patterns in files of `ops/triton`, and their replacements; the last one is an ImportError.
FAULTS = {
    "decode_attention.py": (r"place, out, mask=row_mask", "place, out * 1.1, mask=row_mask"),
    "paged_attention.py": (r"place, out, mask=q_mask", "place, out * 1.1, mask=q_mask"),
    "write_kv.py": (r"offset, v, mask=mask", "offset, v * 2, mask=mask"),
    "elementwise.py": (r"acted \* up", "acted + up"),
    "group_values.py": (r"value = number \* scale", "value = number * scale * 1.1"),
    "fp8_linear.py": (r"product \* scale\[:, None\]", "product * scale[:, None] * 1.1"),
    "sampling.py": (r"^import torch$", "import no_such_module\nimport torch"),
}
DIES = (r"^    kv_heads, block_size, dim = .*$", r"\g<0>\n    if dim == 80:\n        __import__('os')._exit(9)")
HANGS = (r"^    size = x.shape\[-1\]$", r"\g<0>\n    if x.itemsize == 2:\n        __import__('time').sleep(9999)")


def run_gpu(root: Path, folder: Path, *arguments: object) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the lines."""
    command = [str(root / "benchmarks/gpu/run"), str(folder), "--device", "cpu", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=1500, check=False)
    assert done.stdout.startswith(tuple("0123456789")), done.stderr
    return done.returncode, [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1600)
def test_all_steps_pass_on_the_cpu(tmp_path: Path) -> None:
    code, lines = run_gpu(ROOT, tmp_path / "out", "--budget", 1400, "--work", tmp_path / "work")
    assert [line for line in lines if line["status"] == "FAIL"] == []
    assert code == 0
    steps = [line["step"] for line in lines if line["name"] == "whole step"]
    assert steps == ["machine", "kernels", "tokens", "serve", "speed", "ranks"]
    assert all(sum(line["step"] == step for line in lines) > 2 for step in steps)
    names = {line["name"].split()[0] for line in lines if line["step"] == "kernels"}
    kernels = {"decode_attention", "paged_attention", "write_kv", "write_qkv", "rms_norm", "gate", "blocks", "sample"}
    kernels |= {"group_linear", "fp8_linear", "experts"}
    assert kernels <= names
    coded = {line["name"].split()[0] for line in lines if line["name"].endswith(", e4m3 cache")}
    assert {"decode_attention", "paged_attention", "write_kv", "decode"} <= coded


def test_a_run_ends_at_its_budget_and_says_what_it_left_out(tmp_path: Path) -> None:
    code, lines = run_gpu(ROOT, tmp_path / "out", "--budget", 9, "--only", "tokens", "--work", tmp_path / "work")
    assert code == 0
    assert {line["status"] for line in lines if "time was left" in line["note"] or "stopped" in line["note"]} == {
        "skip"
    }


def plant(root: Path, name: str, pattern: str, replacement: str) -> None:
    path = root / "engine/src/octavo_engine/ops/triton" / name
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{name} has changed: {pattern}"
    path.write_text(text)


def test_each_planted_fault_is_one_line_that_names_kernel_type_and_shape(tmp_path: Path) -> None:
    for source in SOURCES:
        target = tmp_path / "root" / source
        target.parent.mkdir(parents=True, exist_ok=True)
        whole = ROOT / source
        shutil.copytree(whole, target) if whole.is_dir() else shutil.copy(whole, target)
    for name, (pattern, replacement) in FAULTS.items():
        plant(tmp_path / "root", name, pattern, replacement)
    plant(tmp_path / "root", "write_qkv.py", *DIES)
    plant(tmp_path / "root", "elementwise.py", *HANGS)
    only = "kernels:attention float32 dim 80|float32$|rms_norm|write_qkv float32|min-p|int8|fp8_linear|e4m3 cache"
    _, lines = run_gpu(
        tmp_path / "root", tmp_path / "out", "--only", only, "--budget", 900, "--work", tmp_path / "work"
    )
    fails = {line["name"]: line["note"] for line in lines if line["status"] == "FAIL"}
    shape = "float32 dim 80, 2 heads a KV head, window"
    shapes = (shape, "float16 dim 64, 4 heads a KV head, plain, e4m3 cache")
    assert sorted(fails) == sorted(
        [f"{kernel} {each}" for kernel in ("decode_attention", "paged_attention", "write_kv") for each in shapes]
        + ["gate float32", "experts float32", "sample float32 2 x 3000, min-p"]  # a gate is between experts' products
        + ["group_linear float16 int8", "fp8_linear float16 groups of 128"]
        + ["rms_norm float16", "write_qkv float32 dim 80, 80 rotary, norm"]
        + ["write_qkv float16 dim 80, 80 rotary, norm, e4m3 cache"]
    )
    assert "no answer within" in fails["rms_norm float16"]
    assert "ended with 9" in fails["write_qkv float32 dim 80, 80 rotary, norm"]
    assert "no_such_module" in fails["sample float32 2 x 3000, min-p"]
    right = {line["name"] for line in lines if line["status"] == "ok"}
    assert {"rms_norm float32", "write_qkv float32 dim 64, 64 rotary", "blocks float32: copied", "whole step"} <= right
