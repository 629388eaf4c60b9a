"""Building the native kernels: once, in the cache folder, by the first process."""

from pathlib import Path

import pytest
from octavo_engine.ops import native_library as module
from octavo_engine.ops.cpu_level import usable_levels
from octavo_engine.ops.native_library import load_library
from octavo_testing.kernel_levels import write_compiler

pytestmark = pytest.mark.slow

LEVEL = usable_levels()[0]


def test_the_library_is_compiled_once_and_cached(cache: Path, tmp_path: Path) -> None:
    counting = write_compiler(tmp_path, f'[ "$1" = --version ] || echo run >> {tmp_path}/runs\nexec g++ "$@"')
    for _ in range(2):
        assert load_library(counting, LEVEL).octavo_tile_rows() == 64
    assert (tmp_path / "runs").read_text() == "run\n"
    assert [p.suffix for p in cache.iterdir()] == [".so"], "no temporary file is left"


def test_other_flags_make_another_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLAGS", tuple(f for f in module._FLAGS if f not in ("-O3", "-fopenmp")))
    load_library("g++", LEVEL)
    monkeypatch.setattr(module, "_FLAGS", (*module._FLAGS, "-g"))
    load_library("g++", LEVEL)
    assert len(list(cache.iterdir())) == 2


def test_a_broken_file_in_the_cache_leaves_torch(cache: Path) -> None:
    load_library("g++", LEVEL)
    (built,) = cache.iterdir()
    built.unlink()  # it is mapped: don't write into it
    built.write_bytes(b"not a library")
    assert load_library("g++", LEVEL).octavo_tile_rows() == 64


def test_an_unwritable_home_compiles_for_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert load_library("g++", LEVEL).octavo_tile_rows() == 64
