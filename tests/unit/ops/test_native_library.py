"""The native kernels: what they serve at every level, and what torch serves, also without a compiler."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from octavo_engine.ops import native_library as native_library_module
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.cpu_backend import cpu_backend
from octavo_engine.ops.cpu_level import Level, usable_levels
from octavo_engine.ops.native_attention import NativeBackend
from octavo_engine.ops.native_library import load_library, native_library
from octavo_engine.ops.reference import ReferenceBackend
from octavo_testing.attention_cases import SeqShape, make_spec, run_history_and_step
from octavo_testing.kernel_levels import level_cases, write_compiler

LEVEL = usable_levels()[0]
SPECS = [LayerKVSpec(num_kv_heads=1, head_dim=16)]


@pytest.fixture(autouse=True)
def _clear_cached_library() -> Iterator[None]:
    """Clear the process's cached library before and after each test."""
    native_library.cache_clear()
    yield
    native_library.cache_clear()


def test_a_failing_compiler_leaves_torch(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = write_compiler(tmp_path, '[ "$1" = --version ] && exit 0\necho "no room" >&2; exit 1')
    monkeypatch.setenv("CXX", failing)
    assert isinstance(cpu_backend(SPECS, 16, torch.float32), CpuBackend)
    assert "no room" in caplog.text
    assert list(cache.iterdir()) == []


def test_a_compiler_beyond_the_limit_leaves_torch_with_the_limit_and_a_remedy(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_library_module, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(native_library_module, "_key", lambda command: "key")
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "exec sleep 60"))
    assert native_library() is None
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "did not end within 0.1 s" in record.message
    assert "start again" in record.message
    assert "sleep" not in record.message
    assert list(cache.iterdir()) == []


def test_a_full_cache_compiles_for_this_process(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(native_library_module, "_open", opened.append)
    script = f"""[ "$1" = --version ] && exit 0
case "$*" in *{cache}*) echo "a.s: No space left on device" >&2; echo "collect2: error" >&2; exit 1;; esac"""
    load_library(write_compiler(tmp_path, script), LEVEL)
    (path,) = opened
    assert path.parent != cache
    assert "for this process only: the compiler ended with status 1: a.s: No space left on device" in caplog.text


@pytest.mark.parametrize("change", ["mode of the file", "mode of the folder", "owner of the folder"])
def test_a_library_that_others_can_change_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(native_library_module, "_open", lambda path: opened.append(path))
    monkeypatch.setattr(native_library_module, "_compile", lambda command, path: path.write_text("compiled"))
    load_library("g++", LEVEL)
    (path,) = opened
    path.write_text("planted")
    if change == "mode of the file":
        path.chmod(0o775)
    elif change == "mode of the folder":
        path.chmod(0o777)
        cache.chmod(0o777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
        if not cache.stat().st_uid:
            os.chown(cache, 54321, -1)  # files of root are trusted

    load_library("g++", LEVEL)

    assert len(opened) == 2
    assert (opened[1] == path) == (change != "owner of the folder")
    assert ("for this process only" in caplog.text) == (change == "owner of the folder")
    assert path.read_text() == ("planted" if change == "owner of the folder" else "compiled")


def test_no_compiler_leaves_torch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert native_library() is None


def test_the_environment_disables_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", "0")
    assert isinstance(cpu_backend(SPECS, 16, torch.float32), CpuBackend)


@pytest.mark.parametrize(
    ("block_size", "dtype", "kind"),
    [
        (16, torch.float32, NativeBackend),
        (128, torch.bfloat16, NativeBackend),
        (16, torch.float16, CpuBackend),
        (3, torch.float32, CpuBackend),
        (256, torch.float32, CpuBackend),
    ],
)
def test_torch_serves_what_the_kernel_does_not_support(block_size: int, dtype: torch.dtype, kind: type) -> None:
    assert isinstance(cpu_backend(SPECS, block_size, dtype), kind)
    assert "CXX" not in os.environ


@pytest.mark.parametrize("level", level_cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_attention_at_every_level_equals_the_reference(level: Level, dtype: torch.dtype) -> None:
    library = load_library("g++", level)
    spec = make_spec(heads=14, kv_heads=2, dim=36, window=40, softcap=9.0)
    shapes = [SeqShape(300, 1), SeqShape(17, 30), SeqShape(0, 50), SeqShape(599, 2)]
    want = run_history_and_step(ReferenceBackend([spec.kv], 32, dtype), spec, shapes, 32, dtype)
    got = run_history_and_step(NativeBackend(library, [spec.kv], 32, dtype), spec, shapes, 32, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
