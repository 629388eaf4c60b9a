"""Compiles the C++ kernels for this machine's CPU on first use, caches the library, and loads it through a plain C ABI.

The file's name is a hash of source, flags, compiler and CPU, so a stale library is never loaded, and machines may share
a home folder. The compiler writes a temporary file that is then renamed: there are no lock files, and two processes may
compile at once. If prebuilt libraries are configured (`prebuilt`), a suitable one is loaded instead. With
OCTAVO_NATIVE=0, without a compiler, or after any failure there is no library, and the callers use torch.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch  # loads the OpenMP runtime that the kernels must share with it

from octavo_engine.ops.cpu_info import cache_folder, cpu_signature
from octavo_engine.ops.prebuilt import prebuilt_library

_LOGGER = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent / "native"
_SOURCES = sorted(_FOLDER.glob("*.cpp"))
_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-fopenmp")
_THIS_MACHINE: tuple[str, ...] = ("-march=native",)
_TIMEOUT_S = 120

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_ARGUMENTS = {
    "octavo_linear": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT, _INT),
    "octavo_linear_gated": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT, _INT),
    "octavo_norm": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _INT, _INT),
    "octavo_rotate": (_POINTER, *(_LONG,) * 4, _POINTER, _POINTER, _LONG, _LONG, _INT, _INT),
    "octavo_apply_token_bitmask": (_POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _INT),
    "octavo_gate": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT, _INT, _INT),
}


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Load the kernels, once per process; return None if they are not available."""
    if os.environ.get("OCTAVO_NATIVE", "1") == "0":
        return None
    ready = prebuilt_library()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if ready is None and compiler is None:
        _LOGGER.warning("no C++ compiler (g++) was found: torch, which is slower, replaces the native kernels")
        return None
    try:
        return _open(ready) if ready is not None else load_library(compiler or "c++")
    except (OSError, subprocess.SubprocessError) as error:
        _LOGGER.warning("the native kernels are not available, torch is used instead: %s", _reason(error))
        return None


def kernels_for(x: torch.Tensor) -> ctypes.CDLL | None:
    """Return the library if its kernels support this tensor's type and device, else None."""
    return native_library() if x.is_cpu and x.dtype in (torch.bfloat16, torch.float32) else None


def load_library(compiler: str) -> ctypes.CDLL:
    command = compile_command(compiler, _THIS_MACHINE)
    path = cache_folder() / f"kernels-{_key(command)}.so"
    with contextlib.suppress(OSError):  # if the file is absent or broken, it is compiled again
        return _open(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(command, path)
        return _open(path)
    except OSError:  # the cache is not writable: compile for this process only
        with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
            path = Path(folder) / path.name
            _compile(command, path)
            return _open(path)


def compile_command(compiler: str, machine: Sequence[str]) -> list[str]:
    """Return the compiler's command line without the output file."""
    return [compiler, *machine, *_FLAGS, *map(str, _SOURCES), *_openmp_runtime()]


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def _compile(command: list[str], path: Path) -> None:
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as file:
        target = Path(file.name)
    try:
        subprocess.run([*command, "-o", str(target)], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        target.replace(path)
    finally:
        target.unlink(missing_ok=True)
    _LOGGER.info("compiled the native kernels in %.1f s: %s", time.perf_counter() - started, path)


def _openmp_runtime() -> list[str]:
    """Return torch's OpenMP runtime as a linker argument: threads of a second runtime would compete with torch's."""
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(own[0])] if own else []


def _key(command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True, timeout=_TIMEOUT_S).stdout
    digest = hashlib.sha256()
    sources = b"\0".join(path.read_bytes() for path in (*_SOURCES, *sorted(_FOLDER.glob("*.h"))))
    for part in (sources, "\0".join(command).encode(), version, cpu_signature().encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _reason(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    return f"{error}: {stderr.strip().splitlines()[-1]}" if isinstance(stderr, str) and stderr.strip() else str(error)
