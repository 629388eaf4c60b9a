"""Prebuilt native kernels for machines without a compiler: one library for each level of CPU features.

`python -m octavo_engine.ops.prebuilt DIR` compiles them, when a container image or a wheel is built. The engine loads
the library of the best level that this process may use (`cpu_level`), from `OCTAVO_PREBUILT` or from the wheel's own
folder.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo_engine.ops.cpu_level import Level, levels_here

#: Folder of the libraries in a wheel for one platform (engine/hatch_build.py); a checkout has none.
WHEEL_FOLDER = Path(__file__).parent / "prebuilt_kernels"


def prebuilt_library(levels: Sequence[Level]) -> Path | None:
    """Return the library of the first of these levels that was built; None if there is none."""
    folder = Path(os.environ.get("OCTAVO_PREBUILT") or WHEEL_FOLDER)
    return next((path for path in (path_of(folder, level) for level in levels) if path.is_file()), None)


def path_of(folder: Path, level: Level) -> Path:
    return folder / f"kernels-{level.name}.so"


def build(folder: Path, compiler: str) -> list[Path]:
    """Compile one library per level; return their paths. Raises CalledProcessError."""
    from octavo_engine.ops.native_library import compile_command

    def compile_level(level: Level) -> Path:
        path = path_of(folder, level)
        subprocess.run([*compile_command(compiler, level.flags), "-o", str(path)], check=True)
        return path

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_level, levels_here()))


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
