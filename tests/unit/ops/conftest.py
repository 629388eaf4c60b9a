"""Tests of the kernels, which also run if OCTAVO_NATIVE=0 prevents the engine from loading the kernels."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_engine.ops.cpu_level import Level
from octavo_engine.ops.native_library import load_library, native_library
from octavo_testing.kernel_levels import level_cases
from octavo_testing.threads import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="package", autouse=True)
def _kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OCTAVO_NATIVE", raising=False)
        native_library.cache_clear()
        yield
    native_library.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for compiled kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo"


@pytest.fixture(scope="module", params=level_cases())
def level(request: pytest.FixtureRequest) -> Level:
    """Each level at which kernels are tested."""
    assert isinstance(request.param, Level)
    return request.param


@pytest.fixture(scope="module")
def library(level: Level) -> ctypes.CDLL:
    """The kernels of `level`."""
    return load_library("g++", level)
