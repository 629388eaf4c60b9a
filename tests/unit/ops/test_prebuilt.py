"""Prebuilt kernels: the highest level that the CPU supports is used, and it gives the same results."""

from pathlib import Path

import pytest
import torch
from octavo_engine.ops import native_library as native_module
from octavo_engine.ops import prebuilt as module
from octavo_engine.ops.cpu_level import Level, levels_here, usable_levels
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.norm import rms_norm, rms_weight
from octavo_engine.ops.prebuilt import build, path_of, prebuilt_library

pytestmark = pytest.mark.slow

HERE = levels_here()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for level in HERE:
        path_of(tmp_path, level).touch()
    monkeypatch.setenv("OCTAVO_PREBUILT", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)
def test_the_best_level_that_was_built_is_selected(folder: Path, level: Level) -> None:
    lower = HERE[HERE.index(level) :]
    assert prebuilt_library(lower) == path_of(folder, level)
    path_of(folder, level).unlink()
    assert prebuilt_library(lower) == (path_of(folder, lower[1]) if lower[1:] else None)


def test_a_wheel_brings_its_own_libraries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_PREBUILT")
    monkeypatch.setattr(module, "WHEEL_FOLDER", folder)
    assert prebuilt_library(HERE) == path_of(folder, HERE[0])


def test_no_prebuilt_library_is_used_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_PREBUILT", raising=False)
    assert prebuilt_library(HERE) is None


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "g++"])
def test_a_prebuilt_library_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    best = usable_levels()[0]
    monkeypatch.setattr(module, "levels_here", lambda: [best])
    monkeypatch.setattr(native_module, "_sources_id", lambda: "older")
    build(tmp_path, "g++")
    monkeypatch.undo()
    monkeypatch.setenv("OCTAVO_PREBUILT", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    native_library.cache_clear()
    try:
        assert (native_library() is None) == (compiler != "g++")
    finally:
        native_library.cache_clear()
    assert f"{path_of(tmp_path, best)} belong to another version" in caplog.text


def test_a_prebuilt_library_computes_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = usable_levels()[0]
    monkeypatch.setattr(module, "levels_here", lambda: [best])
    assert build(tmp_path / "made", "g++") == [path_of(tmp_path / "made", best)]
    monkeypatch.setenv("OCTAVO_PREBUILT", str(tmp_path / "made"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    x, weight = torch.randn(3, 64), rms_weight(torch.randn(64), 1e-5)
    native_library.cache_clear()
    try:
        assert native_library() is not None
        native = rms_norm(x, weight)
        monkeypatch.setenv("OCTAVO_NATIVE", "0")
        native_library.cache_clear()
        torch.testing.assert_close(native, rms_norm(x, weight))
    finally:
        native_library.cache_clear()
