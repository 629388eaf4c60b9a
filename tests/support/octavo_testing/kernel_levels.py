"""The levels at which kernels are tested: all that this CPU has, and tiles in plain C++. Stand-ins for the compiler."""

import platform
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from octavo_engine.ops.cpu_level import LEVELS, Level, cpu_features, levels_here, request_tiles

_EMULATE = "-DEMULATE_TILES"


def emulated(level: Level) -> Level:
    """Return the level with its vectors, and with tiles in plain C++."""
    return replace(level, name=f"emulated-{level.name}", flags=(*level.flags, _EMULATE))


def levels_to_test() -> list[Level]:
    features = cpu_features()
    levels = [level for level in levels_here() if features.issuperset(level.needs)]
    if levels[0].name == "amx" and not request_tiles():
        del levels[0]
    avx2 = next(level for level in LEVELS if level.name == "avx2")
    has_avx2 = platform.machine() == "x86_64" and features.issuperset(avx2.needs)
    return [*levels, emulated(avx2)] if has_avx2 else levels


def level_cases(*, by_vectors: bool = False) -> list[object]:
    """Return the levels as parameters. Two are compiled in the fast tests: the best one, and tiles in plain C++.

    `by_vectors`: one level for each width of vectors, for kernels that use no other features.
    """
    levels = levels_to_test()
    fast = (levels[0], levels[-1])
    if levels[0].name.startswith("avx512"):
        levels.insert(1, emulated(levels[0]))
    if by_vectors:
        levels = list({level.flags[:1]: level for level in sorted(levels, key=fast.__contains__)}.values())
    return [pytest.param(level, id=level.name, marks=() if level in fast else pytest.mark.slow) for level in levels]


def has_fused_products(level: Level) -> bool:
    """Return True if the level's products and sums are rounded once."""
    return level.name not in ("x86-64", "generic")


def write_compiler(folder: Path, script: str) -> str:
    """Write a shell script that stands in for the compiler; return its path."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
