"""Limits of this machine: memory bandwidth and matrix products.

Hosts differ, and one host differs by the hour. Benchmarks therefore print these limits before and after each run;
compare figures of one run only. Run as a script, this module prints the present limits.
"""

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu.timing import median_s

BANDWIDTH_BYTES = 512 << 20  # far beyond any cache
GEMM_SIZE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Rates with all cores: GB/s read and copied (both directions counted), GFLOP/s of a square product."""

    read_gb_s: float
    copy_gb_s: float
    bf16_gflop_s: float
    fp32_gflop_s: float

    def __str__(self) -> str:
        return (
            f"memory {self.read_gb_s:.0f} GB/s read, {self.copy_gb_s:.0f} copy; "
            f"GEMM {self.bf16_gflop_s:.0f} GFLOP/s bf16, {self.fp32_gflop_s:.0f} fp32"
        )


def cores() -> int:
    return len(os.sched_getaffinity(0))


def processor() -> str:
    """Return the processor's name, its number of cores and its vector extensions."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    extensions = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "")]
    return f"{fields.get('model name', platform.machine())}, {cores()} cores, {' '.join(extensions) or 'no AVX2'}"


def measure_limits() -> Limits:
    torch.set_num_threads(cores())
    source = torch.rand(BANDWIDTH_BYTES // 4)
    target = torch.empty_like(source)
    read_s, copy_s = (median_s(work, "cpu", least=9) for work in (source.sum, lambda: target.copy_(source)))
    return Limits(
        read_gb_s=source.nbytes / read_s / 1e9,
        copy_gb_s=2 * source.nbytes / copy_s / 1e9,
        bf16_gflop_s=_gemm_gflop_s(torch.bfloat16),
        fp32_gflop_s=_gemm_gflop_s(torch.float32),
    )


def _gemm_gflop_s(dtype: torch.dtype) -> float:
    square = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
    return 2 * GEMM_SIZE**3 / median_s(lambda: square @ square, "cpu", least=9) / 1e9


def describe(before: Limits, after: Limits) -> dict[str, object]:
    """Return the machine's part of a JSON file of results."""
    return {"processor": processor(), "before": asdict(before), "after": asdict(after)}


if __name__ == "__main__":
    print(processor())
    print(measure_limits())
