"""Prebuilt native kernels for machines without a compiler: one library for each level of CPU features.

`python -m octavo_engine.ops.prebuilt DIR` compiles them, when a container image or a wheel is built. The engine loads
the library for the highest level whose features this CPU has, from `OCTAVO_PREBUILT` or from the wheel's own folder.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo_engine.ops.cpu_info import cpu_features

#: Folder of the libraries in a wheel for one platform (engine/hatch_build.py); a checkout has none.
WHEEL_FOLDER = Path(__file__).parent / "prebuilt_kernels"

_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    machine: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]


#: The CPU levels for which libraries are built, from the highest to the lowest.
LEVELS = (
    Level("sapphirerapids", "x86_64", ("-march=sapphirerapids",), (*_V4, "avx512_bf16", "avx512_fp16", "amx_bf16")),
    Level("x86-64-v4-bf16", "x86_64", ("-march=x86-64-v4", "-mavx512bf16"), (*_V4, "avx512_bf16")),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Level("x86-64", "x86_64", ("-march=x86-64",), ()),
    Level("armv8.6-a", "aarch64", ("-march=armv8.6-a",), ("bf16", "i8mm")),
    Level("armv8-a", "aarch64", ("-march=armv8-a",), ()),
)


def prebuilt_library(features: frozenset[str] | None = None) -> Path | None:
    """Return the library of the highest level that this CPU supports; None if there is none."""
    folder = Path(os.environ.get("OCTAVO_PREBUILT") or WHEEL_FOLDER)
    has = cpu_features() if features is None else features
    fitting = [level for level in _levels_here() if has.issuperset(level.needs)]
    paths = [path_of(folder, level) for level in fitting]
    return next((path for path in paths if path.is_file()), None)


def path_of(folder: Path, level: Level) -> Path:
    return folder / f"kernels-{level.name}.so"


def _levels_here() -> list[Level]:
    return [level for level in LEVELS if level.machine == platform.machine()]


def build(folder: Path, compiler: str) -> list[Path]:
    """Compile one library per level; return their paths. Raises CalledProcessError."""
    from octavo_engine.ops.native_library import compile_command

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for level in _levels_here():
        path = path_of(folder, level)
        subprocess.run([*compile_command(compiler, level.flags), "-o", str(path)], check=True)
        made.append(path)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the native kernels for every level of this CPU architecture.")
    parser.add_argument("folder", type=Path, help="Folder to write the libraries to.")
    args = parser.parse_args(argv)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        print("no C++ compiler (g++) was found", file=sys.stderr)
        return 1
    for path in build(args.folder, compiler):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
