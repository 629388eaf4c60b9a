"""Which CPU this is, for keys of what was measured or compiled on it, and where such things are kept."""

import os
import platform
from pathlib import Path

_LINES = ("model name", "flags", "CPU part", "Features")


def cpu_signature() -> str:
    """Name and features: the same name may hide different instruction sets behind a hypervisor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(_LINES)))


def cpu_features() -> frozenset[str]:
    """As Linux names them, e.g. `avx512_bf16`; empty where it doesn't say."""
    for line in cpu_signature().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
