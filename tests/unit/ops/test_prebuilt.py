"""Prebuilt kernels: the highest level that the CPU supports is used, and it gives the same results."""

import platform
from pathlib import Path

import pytest
import torch
from octavo_engine.ops import prebuilt as module
from octavo_engine.ops.cpu_info import cpu_features
from octavo_engine.ops.native_library import native_library
from octavo_engine.ops.norm import rms_norm, rms_weight
from octavo_engine.ops.prebuilt import LEVELS, Level, build, path_of, prebuilt_library

HERE = [level for level in LEVELS if level.machine == platform.machine()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for level in HERE:
        path_of(tmp_path, level).touch()
    monkeypatch.setenv("OCTAVO_PREBUILT", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)
def test_the_highest_supported_level_is_selected(folder: Path, level: Level) -> None:
    assert prebuilt_library(frozenset(level.needs)) == path_of(folder, level)
    lower = HERE[HERE.index(level) + 1 :]
    if level.needs:
        lacking = frozenset(level.needs) - {level.needs[-1]}
        expected = next((path_of(folder, low) for low in lower if lacking.issuperset(low.needs)), None)
        assert prebuilt_library(lacking) == expected


def test_a_level_that_was_not_built_is_skipped(folder: Path) -> None:
    best, *others = [level for level in HERE if cpu_features().issuperset(level.needs)]
    path_of(folder, best).unlink()
    assert prebuilt_library() == (path_of(folder, others[0]) if others else None)


def test_a_wheel_brings_its_own_libraries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_PREBUILT")
    monkeypatch.setattr(module, "WHEEL_FOLDER", folder)
    assert prebuilt_library(frozenset()) == path_of(folder, HERE[-1])


def test_no_prebuilt_library_is_used_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_PREBUILT", raising=False)
    assert prebuilt_library() is None


def test_a_prebuilt_library_computes_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = next(level for level in HERE if cpu_features().issuperset(level.needs))
    monkeypatch.setattr(module, "LEVELS", (best,))
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
