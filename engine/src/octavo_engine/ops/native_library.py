"""Compiles the C++ kernels for this CPU's level on first use, caches the library, and loads it through a plain C ABI.

The file's name is a hash of source, flags (so of the level) and compiler: a stale library is never loaded, and machines
may share a home folder. The compiler writes a temporary file that is then renamed: there are no lock files, and two
processes may compile at once. If prebuilt libraries are configured (`prebuilt`), a suitable one is loaded instead,
unless it was built from other sources. With OCTAVO_NATIVE=0, without a compiler, or after any failure there is no
library, and the callers use torch.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch  # loads the OpenMP runtime that the kernels must share with it

from octavo_engine.ops.cpu_level import Level, cache_folder, usable_levels
from octavo_engine.ops.prebuilt import prebuilt_library
from octavo_engine.ops.recording import recordable

_LOGGER = logging.getLogger(__name__)
_FOLDER = Path(__file__).parent / "native"
_SOURCES = sorted(_FOLDER.glob("*.cpp"))
_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-fopenmp")
#: Many times what a busy machine needs, and more than a test may take, so that no test silently uses torch instead.
_TIMEOUT_S = 900
_REASON_CHARS = 300

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
KERNEL_ARGUMENTS = {
    "octavo_linear": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _INT, _INT, _INT),
    "octavo_pack_blocks": (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT),
    "octavo_gather_blocks": (_POINTER, _LONG, _LONG, _POINTER, _LONG, _FLOAT, _POINTER, _INT),
    "octavo_norm": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _INT, _INT),
    "octavo_rotate": (_POINTER, *(_LONG,) * 4, _POINTER, _POINTER, _LONG, _LONG, _INT, _INT),
    "octavo_apply_token_bitmask": (_POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _INT),
    "octavo_sample": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "octavo_ranks": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _POINTER, _INT),
    "octavo_gate": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT, _INT, _INT),
    "octavo_gather": (_POINTER, *(_LONG,) * 4, _POINTER, _LONG, _FLOAT, _POINTER, _INT, _INT),
    "octavo_write": (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    "octavo_attend": (_POINTER, _POINTER, _POINTER, _LONG, _POINTER),
}


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Load the kernels, once per process; return None if they are not available."""
    if os.environ.get("OCTAVO_NATIVE", "1") == "0":
        return None
    levels = usable_levels()
    is_set = os.environ.get("OCTAVO_CPU_LEVEL") == levels[0].name
    reason = "set by OCTAVO_CPU_LEVEL" if is_set else "the highest available here"
    _LOGGER.info("the CPU level is %s: %s", levels[0].name, reason)
    ready = prebuilt_library(levels)
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++")), None)
    try:
        library = None if ready is None else _open_prebuilt(ready)
        if library is None and compiler is None:
            _LOGGER.warning("no C++ compiler (g++) was found: torch, which is slower, replaces the native kernels")
        return library if library is not None or compiler is None else load_library(compiler, levels[0])
    except (OSError, subprocess.SubprocessError) as error:
        _LOGGER.warning("torch, which is slower, replaces the native kernels: %s", _reason(error))
        return None


def kernels_for(x: torch.Tensor) -> ctypes.CDLL | None:
    """Return the library if its kernels support this tensor's type and device, else None."""
    return native_library() if x.is_cpu and x.dtype in (torch.bfloat16, torch.float32) else None


def load_library(compiler: str, level: Level) -> ctypes.CDLL:
    """Load the library for a level that this CPU has, compiled before or now. Raises OSError, SubprocessError."""
    command = compile_command(compiler, level.flags)
    path = cache_folder() / f"kernels-{_key(command)}.so"
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder = path.parent.stat()
        if folder.st_uid == os.geteuid():
            path.parent.chmod(stat.S_IMODE(folder.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        check_owner(path.parent)
        with contextlib.suppress(OSError):  # if the file is absent, broken or another user's, it is compiled again
            check_owner(path)
            return _open(path)
        _compile(command, path)
        return _open(path)
    except (OSError, subprocess.CalledProcessError) as error:  # the cache is not writable, not safe, or full
        _LOGGER.warning("the native kernels are compiled for this process only: %s", _reason(error))
        with tempfile.TemporaryDirectory(prefix="octavo-") as temporary:
            path = Path(temporary) / path.name
            _compile(command, path)
            return _open(path)


def check_owner(path: Path) -> None:
    """Check that only this user and root can change a file or folder of code. Raises PermissionError."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} can be changed by other users: chown it, and run chmod go-w")


def compile_command(compiler: str, machine: Sequence[str]) -> list[str]:
    """Return the compiler's command line without the output file."""
    build = f'-DOCTAVO_SOURCES="{_sources_id()}"'
    return [compiler, *machine, *_FLAGS, build, *map(str, _SOURCES), *_openmp_runtime()]


def _open_prebuilt(path: Path) -> ctypes.CDLL | None:
    """Load a prebuilt library; return None if it was built from other sources than this version's."""
    library = ctypes.CDLL(str(path))
    identify = getattr(library, "octavo_sources", None)
    if identify is not None:
        identify.restype = ctypes.c_char_p
    if identify is None or identify() != _sources_id().encode():
        _LOGGER.warning("the prebuilt kernels %s belong to another version of Octavo and are not used", path)
        return None
    return _open(path)


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    replay = library.octavo_replay
    replay.argtypes, replay.restype = (_POINTER, _LONG), None
    for name, arguments in KERNEL_ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
        setattr(library, name, recordable(function, replay))
    return library


def _compile(command: list[str], path: Path) -> None:
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as file:
        target = Path(file.name)
    try:
        subprocess.run([*command, "-o", str(target)], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        target.chmod(0o755)
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
    return _digest("\0".join(command).encode(), version)


def _sources_id() -> str:
    return _digest(*(path.read_bytes() for path in (*_SOURCES, *sorted(_FOLDER.glob("*.h")))))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _reason(error: Exception) -> str:
    """Return the last messages of the compiler as one line; the very last one alone often lacks the reason."""
    if isinstance(error, subprocess.TimeoutExpired):
        late = f"the compiler did not end within {_TIMEOUT_S} s"
        return f"{late}: start again when the machine is less busy; later starts reuse the compiled kernels"
    stderr = getattr(error, "stderr", None)
    if not isinstance(stderr, str):
        return str(error)
    status = getattr(error, "returncode", None)
    return f"the compiler ended with status {status}: {' '.join(stderr.split())[-_REASON_CHARS:]}"
