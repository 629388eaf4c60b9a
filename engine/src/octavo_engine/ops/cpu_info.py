"""The CPU's identity, used as a key for measurements and compiled kernels, and the folder that caches them."""

import os
import platform
from pathlib import Path

_LINES = ("model name", "flags", "CPU part", "Features")


def cpu_signature() -> str:
    """Return the CPU's name and features; behind a hypervisor, equal names may have different instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(_LINES)))


def cpu_features() -> frozenset[str]:
    """Return the CPU's features by Linux's names, e.g. `avx512_bf16`; empty if Linux lists none."""
    for line in cpu_signature().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
