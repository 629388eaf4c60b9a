"""The choice of the CPU level: by features, by OCTAVO_CPU_LEVEL, and by the permission to use AMX."""

import logging
import platform

import pytest
from octavo_engine.ops import cpu_level as module
from octavo_engine.ops import native_library as library_module
from octavo_engine.ops.cpu_level import LEVELS, Level, levels_here, usable_levels
from octavo_engine.ops.native_library import native_library

X86 = [level for level in LEVELS if level.machine == "x86_64"]
ALL_FEATURES = frozenset(X86[0].needs)


@pytest.fixture(autouse=True)
def _x86(monkeypatch: pytest.MonkeyPatch) -> None:
    """An x86 CPU whose system permits AMX."""
    monkeypatch.delenv("OCTAVO_CPU_LEVEL", raising=False)
    monkeypatch.setattr(module, "request_tiles", lambda: True)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def names(levels: list[Level]) -> list[str]:
    return [level.name for level in levels]


@pytest.mark.parametrize("level", X86, ids=lambda level: level.name)
def test_the_highest_level_of_the_features_comes_first(level: Level) -> None:
    assert usable_levels(frozenset(level.needs)) == X86[X86.index(level) :]
    for missing in level.needs:
        assert level not in usable_levels(frozenset(level.needs) - {missing})


@pytest.mark.parametrize("level", X86, ids=lambda level: level.name)
def test_the_environment_selects_a_lower_level(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_LEVEL", level.name)
    assert usable_levels(ALL_FEATURES)[0] == level


@pytest.mark.parametrize("wanted", ["amx", "sse9"])
def test_a_level_that_is_not_available_is_ignored_with_a_warning(
    wanted: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_CPU_LEVEL", wanted)
    avx2 = next(level for level in X86 if level.name == "avx2")
    assert names(usable_levels(frozenset(avx2.needs))) == ["avx2", "x86-64"]
    assert f"OCTAVO_CPU_LEVEL={wanted} is ignored: the levels available here are avx2, x86-64" in caplog.text


def test_without_permission_amx_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "request_tiles", lambda: False)
    assert usable_levels(ALL_FEATURES)[0].name == "avx512bf16"
    assert "the operating system refuses AMX" in caplog.text


def test_an_architecture_without_levels_has_a_generic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert names(levels_here()) == ["generic"]
    assert names(usable_levels(frozenset())) == ["generic"]


def test_the_level_and_the_reason_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[Level] = []
    monkeypatch.setattr(library_module, "load_library", lambda compiler, level: loaded.append(level))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(module, "cpu_features", lambda: ALL_FEATURES)
    native_library.cache_clear()
    with caplog.at_level(logging.INFO):
        native_library()
        monkeypatch.setenv("OCTAVO_CPU_LEVEL", "avx2")
        native_library.cache_clear()
        native_library()
    native_library.cache_clear()
    assert names(loaded) == ["amx", "avx2"]
    assert "the CPU level is amx: the highest available here" in caplog.text
    assert "the CPU level is avx2: set by OCTAVO_CPU_LEVEL" in caplog.text
