"""`--kv-cache-dtype fp8`: its plan on a GPU, the identity of its blocks, the checkpoint's scales, and no CPU."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM
from octavo_engine.devices.cuda_device import CudaDevice
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import GIB, MemoryInfo
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.runner import capacity
from octavo_engine.runner.capacity import Capacity, plan_capacity
from octavo_engine.runner.load import load
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import root_hash
from octavo_server.cli.main import main
from octavo_testing.tiny_models import make_tiny
from octavo_testing.triton_device import triton_kernels
from safetensors.torch import load_file, save_file

CHECKPOINT = Path(__file__).parents[1] / "weights" / "quantised_checkpoints" / "fp8_tensor"


class DryGpu(CudaDevice):
    """A GPU of which only the figures exist."""

    def prepare(self, config: EngineConfig) -> None:
        """Do nothing: there is no context."""

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return MemoryInfo(total_bytes=80 * GIB, available_bytes=79 * GIB, utilization=0.9)

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return CudaBackend(specs, block_size, dtype, "meta", num_programs=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    device = DryGpu()
    monkeypatch.setattr(capacity, "open_device", lambda kind: device)
    return device


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_block_takes_a_byte_for_each_value(dtype: Any, folder: Path) -> None:
    """The type of the model and its weights stay as they are."""

    def plan(kind: Any) -> Capacity:
        sizes: dict[str, Any] = {"kv_cache_memory_bytes": 16_000_000, "swap_space": 0.01, "max_model_len": 64}
        return plan_capacity(EngineConfig(model=str(folder), dtype=dtype, kv_cache_dtype=kind, **sizes))

    wide, narrow = plan("auto"), plan("fp8")
    times = 2 if dtype == "auto" else 4
    assert wide.bytes_per_block == times * narrow.bytes_per_block
    assert narrow.num_blocks // times == wide.num_blocks
    assert narrow.num_host_blocks // times == wide.num_host_blocks > 0
    assert (wide.dtype, wide.weights_bytes) == (narrow.dtype, narrow.weights_bytes)
    assert abs(wide.kv_bytes - narrow.kv_bytes) < wide.bytes_per_block


@pytest.mark.usefixtures("gpu")
def test_a_dry_run_shows_the_effect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["serve", str(folder), "--device", "cuda", "--dry-run"]
    sizes = []
    for more in ([], ["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype=fp8_e4m3"]):
        assert main([*flags, *more, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        sizes.append((report["bytes_per_block"], report["kv_bytes_per_token"], report["kv_tokens"]))
    assert [size // 2 for size in sizes[0][:2]] == [*sizes[1][:2]]
    assert sizes[1] == sizes[2]
    assert main(flags) == 0
    assert "--kv-cache-dtype fp8        one byte for each value of the KV cache" in capsys.readouterr().out
    assert main([*flags, "--kv-cache-dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "--kv-cache-dtype" not in out
    assert "at least doubles the memory of the weights\n" in out


def ready(folder: Path, **fields: Any) -> ReadyInfo:
    sizes: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 20, "max_model_len": 64}
    executor, info = load(EngineConfig(model=str(folder), **sizes, **fields))
    executor.shutdown()
    return info


def test_blocks_have_the_identity_of_the_caches_type(folder: Path) -> None:
    """The root is in the `hello` frame and in the model card: routers never share blocks of other types."""
    with triton_kernels():
        wide, *narrow = [ready(folder, kv_cache_dtype=kind) for kind in ("auto", "fp8", "fp8_e4m3")]
    assert (wide.kv_dtype, wide.dtype) == ("float32", "float32")
    for each in narrow:
        assert (each.kv_dtype, each.dtype) == ("fp8_e4m3", "float32")
        assert each.weights_fingerprint == wide.weights_fingerprint
        assert each.hash_root == root_hash(wide.weights_fingerprint, "fp8_e4m3 of float32", 16) != wide.hash_root
        assert 4 * each.kv_bytes == wide.kv_bytes


def test_the_backend_gets_the_scales_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "m")
    scales = {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([3.0])}
    tensors = {f"model.layers.0.self_attn.{name}": scale for name, scale in scales.items()}
    path = tmp_path / "m" / "model.safetensors"
    save_file(load_file(path) | tensors, path)
    made: list[LayerKVSpec] = []

    def backend(self: CpuDevice, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> CudaBackend:
        made[:] = specs
        return CudaBackend(specs, block_size, dtype, "cpu", num_programs=5)

    monkeypatch.setattr(CpuDevice, "attention_backend", backend)
    found = {}
    for kind in ("auto", "fp8"):
        ready(tmp_path / "m", kv_cache_dtype=kind)
        found[kind] = [(spec.k_scale, spec.v_scale) for spec in made]
    assert found == {"auto": [(1.0, 1.0)], "fp8": [(0.25, 3.0)]}


@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3"])
def test_a_cpu_refuses_it_in_one_line(kind: Any, folder: Path) -> None:
    fields: dict[str, Any] = {"model": str(folder), "kv_cache_dtype": kind, "device": "cpu", "num_threads": 1}
    for start in (
        lambda: load(EngineConfig(**fields)),
        lambda: plan_capacity(EngineConfig(**fields)),
        lambda: LLM(**fields),
    ):
        with pytest.raises(StartupError) as refused:
            start()
        assert str(refused.value) == (
            "--kv-cache-dtype fp8_e4m3 needs a GPU, but the device is cpu: leave it out, or use --device cuda."
        )


@pytest.mark.parametrize("kind", ["fp8_e5m2", "int8", "bfloat16"])
def test_other_types_are_refused(kind: Any) -> None:
    with pytest.raises(StartupError, match=f"^kv_cache_dtype must be one of auto, fp8_e4m3, fp8, got '{kind}'"):
        EngineConfig(kv_cache_dtype=kind)
