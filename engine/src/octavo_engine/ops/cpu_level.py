"""Identifies the CPU, lists the feature levels for which the kernels are compiled, and chooses one of these levels.

The choice depends on the CPU's features, never on its model name. `OCTAVO_CPU_LEVEL` selects a lower level. The CPU's
identity is part of the keys under which `cache_folder` keeps measurements and compiled kernels.
"""

import ctypes
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_LOGGER = logging.getLogger(__name__)

_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64
_LINES = ("model name", "flags", "CPU part", "Features")


@dataclass(frozen=True, slots=True)
class Level:
    """`flags`: of the compiler. `needs`: CPU features, as Linux names them."""

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]


_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
_AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
_VNNI, _BF16 = (*_V4, "avx512_vnni"), (*_V4, "avx512_vnni", "avx512_bf16")
#: The levels of all architectures, from the highest to the lowest.
LEVELS = (
    Level("amx", "x86_64", (*_BF16_FLAGS, *_AMX_FLAGS), (*_BF16, "amx_tile", "amx_bf16", "amx_int8")),
    Level("avx512bf16", "x86_64", _BF16_FLAGS, _BF16),
    Level("avx512vnni", "x86_64", _VNNI_FLAGS, _VNNI),
    Level("avx512", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("avx2", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86-64", "x86_64", ("-march=x86-64",), ()),
    Level("armv8.6-a", "aarch64", ("-march=armv8.6-a",), ("bf16", "i8mm")),
    Level("armv8-a", "aarch64", ("-march=armv8-a",), ()),
)
_OTHER = Level("generic", platform.machine(), (), ())  # for an architecture that has no levels


def levels_here() -> list[Level]:
    return [level for level in LEVELS if level.machine == platform.machine()] or [_OTHER]


def usable_levels(features: frozenset[str] | None = None) -> list[Level]:
    """Return the levels that this process may use, the best first. A level that is not available is logged."""
    has = cpu_features() if features is None else features
    levels = [level for level in levels_here() if has.issuperset(level.needs)]
    if levels[0].name == "amx" and not request_tiles():
        _LOGGER.warning("the operating system refuses AMX to this process: the CPU level is %s", levels[1].name)
        del levels[0]
    wanted = os.environ.get("OCTAVO_CPU_LEVEL")
    names = [level.name for level in levels]
    if wanted in names:
        return levels[names.index(wanted) :]
    if wanted:
        available = ", ".join(names)
        _LOGGER.warning("OCTAVO_CPU_LEVEL=%s is ignored: the levels available here are %s", wanted, available)
    return levels


def request_tiles() -> bool:
    """Ask Linux to let this process use AMX tiles; return False if it refuses, as some sandboxes do."""
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def cpu_signature() -> str:
    """Return the CPU's name and features; in virtual machines, CPUs of one name may differ in features."""
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
