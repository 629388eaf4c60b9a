"""What torch's CPU kernels remember is bounded before torch is loaded, unless the user has chosen."""

import os

import pytest
from octavo_engine.engine_start import find_loader
from octavo_engine.runner.shape_caches import SHAPES
from octavo_testing.scripted import LOADER

NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def test_whoever_loads_an_executor_bounds_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAMES[0], raising=False)
    monkeypatch.setenv(NAMES[1], "7")
    find_loader(LOADER)
    assert [os.environ[name] for name in NAMES] == [SHAPES, "7"]
