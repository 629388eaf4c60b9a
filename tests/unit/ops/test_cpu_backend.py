"""The choice of the attention backend: torch, several times slower, is announced by one line with the remedy."""

import pytest
import torch
from octavo_engine.ops import cpu_backend
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.native_attention import NativeBackend

SPECS = [LayerKVSpec(num_kv_heads=2, head_dim=16)]


@pytest.fixture(autouse=True)
def _no_earlier_line() -> None:
    cpu_backend.warn_once.cache_clear()


@pytest.mark.parametrize(("block_size", "dtype"), [(24, torch.bfloat16), (16, torch.float16)], ids=str)
def test_the_slow_path_is_announced_once(block_size: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert isinstance(cpu_backend.cpu_backend(SPECS, block_size, dtype), CpuBackend)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for part in (str(dtype).removeprefix("torch."), f"--block-size {block_size}", "--dtype bfloat16"):
        assert part in record.message


def test_the_compiled_kernel_is_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(cpu_backend.cpu_backend(SPECS, 16, torch.bfloat16), NativeBackend)
    assert not caplog.records


def test_a_missing_kernel_is_announced_by_its_loader_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_backend, "native_library", lambda: None)
    assert isinstance(cpu_backend.cpu_backend(SPECS, 16, torch.bfloat16), CpuBackend)
    assert not caplog.records
