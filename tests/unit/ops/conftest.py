"""Tests of the kernels, which also run if OCTAVO_NATIVE=0 prevents the engine from loading the kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_engine.ops.native_library import native_library
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
