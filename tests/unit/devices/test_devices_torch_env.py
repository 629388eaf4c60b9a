"""The CPU settings of torch's libraries, and of the C allocator, are set before torch is imported, unless the user has
set them.
"""

import ctypes
import os
import subprocess
import sys

import pytest
from octavo_engine.devices.memory import keep_freed_memory
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


FREED = """
import ctypes, resource
from octavo_engine.devices.memory import keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
counts = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    outputs = [libc.malloc(8 << 20) for _ in range(6)]
    for output in outputs:
        libc.memset(output, 1, 8 << 20)
        libc.free(output)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*counts)
"""
HAS_GLIBC = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")


def count_faults(**env: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", FREED], check=True, capture_output=True, text=True, env=env)
    return [int(count) for count in done.stdout.split()]


@HAS_GLIBC
def test_freed_memory_is_used_again_without_page_faults() -> None:
    first, *others = count_faults()
    assert first > 1000
    assert max(others) < 10


@HAS_GLIBC
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_settings_of_the_allocator_by_the_user_are_kept(name: str) -> None:
    assert min(count_faults(**{name: "131072"})) > 1000


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_freed_memory()
