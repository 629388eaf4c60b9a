"""The CPU settings of torch's libraries are set before torch is imported, unless the user has set them."""

import os
import subprocess
import sys

import pytest
from octavo_engine.devices.torch_env import SHAPES, SPIN_COUNT, limit_openmp_spin
from octavo_engine.loop.start import find_loader
from octavo_testing.scripted import LOADER

CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

SCRIPT = """
import os, sys
from octavo_engine.loop.start import find_loader
assert "torch" not in sys.modules
find_loader("octavo_engine.runner.load:load")
assert "torch" in sys.modules
print(os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_spin_count_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv(name, "5")
    limit_openmp_spin()
    assert os.environ.get("GOMP_SPINCOUNT") == ("5" if name == "GOMP_SPINCOUNT" else None)


def test_the_spin_count_is_set_before_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=240, env={"PATH": "/bin"}
    )
    assert done.stdout.strip() == SPIN_COUNT


def test_loading_an_executor_bounds_the_shape_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHES[0], raising=False)
    monkeypatch.setenv(CACHES[1], "7")
    find_loader(LOADER)
    assert [os.environ[name] for name in CACHES] == [SHAPES, "7"]
