"""`--device cuda` without a GPU: causes and remedies, and the arithmetic of a GPU's memory."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.cuda_calls import is_out_of_memory
from octavo_engine.devices.cuda_device import (
    CudaDevice,
    CudaFacts,
    describe_problem,
    find_cuda_problem,
    has_kernels,
    is_cuda_failure,
    is_writable,
    kernel_cache_folder,
    step_bytes,
)
from octavo_engine.devices.cuda_graphs import GraphedSteps, capture_sizes, decode_buckets, prompt_buckets
from octavo_engine.devices.device import open_device
from octavo_engine.devices.dtype import layer_shapes
from octavo_engine.devices.memory import GIB, MIB, MemoryInfo
from octavo_engine.devices.step_inputs import StepLimits
from octavo_engine.models.registry import build_model
from octavo_engine.ops.attention import AttentionBackend, LayerKVSpec
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.rank_group import Group
from octavo_engine.runner.checkpoint import Checkpoint
from octavo_engine.runner.kv_cache_size import ModelMemory, fitting_len, size_kv
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.settings.config import EngineConfig, batched_tokens
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.tiny_models import make_tiny
from torch import Tensor

BLOCK = MIB
MODEL = ModelMemory(weights_bytes=16 * GIB, bytes_per_block=BLOCK, reserve_bytes=2 * GIB)


def gpu(*, total: int = 80, free: int = 79, engines: int = 1) -> MemoryInfo:
    return MemoryInfo(
        total_bytes=total * GIB,
        available_bytes=free * GIB,
        num_engines=engines,
        utilization=0.9,
        host_available_bytes=64 * GIB,
    )


@pytest.mark.parametrize(
    ("facts", "cause", "remedy"),
    [
        (CudaFacts(is_cuda_build=False, has_triton=False), "without CUDA", "install torch for CUDA"),
        (CudaFacts(device_error="Found no NVIDIA driver on your system"), "Found no NVIDIA driver", "nvidia-smi"),
        (CudaFacts(capability=(7, 5)), "7.5", "Ampere"),
        (CudaFacts(driver_cuda=(12, 2), built_cuda=(13, 0)), "CUDA up to 12.2", "TORCH_INDEX"),
        (CudaFacts(capability=(10, 0), architectures=("sm_80", "sm_90")), "10.0, only for sm_80, sm_90", "whl/cu130"),
        (CudaFacts(free_bytes=MIB), "1.0 MiB", "end other programs"),
        (CudaFacts(has_triton=False), "triton", "octavo-engine[cuda]"),
        (CudaFacts(has_compiler=False), "C compiler", "gcc"),
        (CudaFacts(has_python_h=False), "Python.h", "python3-dev"),
        (CudaFacts(is_cache_writable=False, kernel_cache=Path("/ro")), "/ro", "TRITON_CACHE_DIR"),
    ],
)
def test_each_cause_is_one_line_with_a_remedy(facts: CudaFacts, cause: str, remedy: str) -> None:
    found = describe_problem(facts)
    assert found is not None
    assert cause in found
    assert remedy in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ([], (10, 0), True),
        (["sm_80", "sm_90"], (8, 6), True),
        (["sm_86", "sm_90"], (8, 0), False),
        (["sm_80", "sm_90"], (10, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_90", "compute_90"], (12, 0), True),
        (["sm_100", "sm_120"], (12, 1), True),
        (["sm_100"], (9, 0), False),
    ],
)
def test_architectures_run_on_capabilities(architectures: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert has_kernels(architectures, capability) is runs


def test_a_machine_that_has_everything_has_no_problem() -> None:
    assert describe_problem(CudaFacts(driver_cuda=(12, 2), built_cuda=(12, 6))) is None
    assert describe_problem(CudaFacts()) is None
    assert describe_problem(CudaFacts(capability=(10, 0))) is None


def test_the_reason_of_torch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(index: int) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check that you have one.")

    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "get_device_capability", no_driver)
    found = find_cuda_problem()
    assert found is not None
    assert "Found no NVIDIA driver on your system)" in found
    assert "\n" not in found


def test_a_machine_is_examined_through_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device=None: (79 * GIB, 80 * GIB))
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    found = find_cuda_problem()
    assert found is not None
    memory = CudaDevice().memory()
    assert (memory.total_bytes, memory.available_bytes, memory.utilization) == (80 * GIB, 79 * GIB, 0.9)


def test_the_kernel_cache_follows_tritons_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert kernel_cache_folder() == tmp_path / ".triton" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/kernels")
    assert kernel_cache_folder() == Path("/kernels")
    assert is_writable(tmp_path / "new" / "folder")
    (tmp_path / "file").touch()
    assert not is_writable(tmp_path / "file" / "folder")


def test_a_user_without_a_home_or_with_a_hidden_one_has_a_problem_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def denied(path: Path, *, follow_symlinks: bool = True) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    for variable in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert kernel_cache_folder() == Path("~/.triton/cache")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) in hidden.parents and access(path, mode))
    monkeypatch.setattr(Path, "exists", denied)
    assert is_writable(hidden / ".triton" / "cache")


def test_auto_logs_why_it_uses_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo_engine.devices.device"):
        assert open_device("auto").name == "cpu"
        assert open_device("cpu").name == "cpu"
    (record,) = caplog.records
    assert str(find_cuda_problem()) in record.getMessage()


@pytest.mark.parametrize(
    ("used_by_others", "utilization", "kv_gib"),
    [(1, None, 72 - 1 - 18), (1, 0.5, 40 - 1 - 18), (30, None, 72 - 30 - 18)],
)
def test_the_cache_takes_its_share_less_what_is_used(used_by_others: int, utilization: float, kv_gib: int) -> None:
    config = EngineConfig(gpu_memory_utilization=utilization)
    kv = size_kv(config, MODEL, gpu(free=80 - used_by_others), max_model_len=1024)
    assert kv.kv_bytes == pytest.approx(kv_gib * GIB, abs=BLOCK)


def test_engines_on_one_gpu_divide_the_share() -> None:
    first = size_kv(EngineConfig(), MODEL, gpu(free=80, engines=2), max_model_len=1024)
    assert first.kv_bytes == pytest.approx((36 - 18) * GIB, abs=BLOCK)
    second = size_kv(EngineConfig(), MODEL, gpu(free=80 - 36, engines=2), max_model_len=1024)
    assert second.kv_bytes == pytest.approx((36 - 18) * GIB, abs=BLOCK)


def test_swap_space_is_host_memory() -> None:
    config = EngineConfig(swap_space=32.0)
    kv = size_kv(config, MODEL, gpu(free=80), max_model_len=1024)
    assert kv.kv_bytes == pytest.approx((72 - 18) * GIB, abs=BLOCK)
    assert kv.num_host_blocks == 32 * GIB // BLOCK
    with pytest.raises(StartupError, match=r"--swap-space 65 .* 64\.00 GiB .* at most 64\.00") as raised:
        size_kv(EngineConfig(swap_space=65.0), MODEL, gpu(), max_model_len=1024)
    assert raised.value.code == "OutOfMemory"


def test_a_model_that_does_not_fit_names_the_flags() -> None:
    with pytest.raises(StartupError, match=r"largest step 2\.00 GiB.*--max-num-batched-tokens") as raised:
        fitting_len(EngineConfig(), MODEL, gpu(total=18, free=18), longest=4096)
    assert raised.value.code == "OutOfMemory"
    with pytest.raises(StartupError, match=r"largest step 2\.00 GiB .*--max-model-len to at most 32768"):
        size_kv(EngineConfig(max_model_len=65536), MODEL, gpu(total=24, free=20), max_model_len=65536)


def test_the_default_number_of_tokens_depends_on_the_device() -> None:
    assert batched_tokens(EngineConfig(), "cpu") == 2048
    assert batched_tokens(EngineConfig(), "cuda") == 8192
    assert batched_tokens(EngineConfig(max_num_batched_tokens=7), "cuda") == 7


class DryGpu(CudaDevice):
    """A GPU of which only the figures exist; its KV cache has the sizes of the CPU's."""

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return gpu()

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return CpuBackend(specs, block_size, dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


def test_a_plan_for_a_gpu_packs_no_weights(folder: Path) -> None:
    model = load_model_config(resolve_model(str(folder)))
    plan = plan_memory(EngineConfig(model=str(folder)), DryGpu(), model)
    assert plan.dtype == torch.bfloat16
    assert plan.model.reserve_bytes == step_bytes(EngineConfig(), model, torch.bfloat16)
    meta = build_model(model, dtype=torch.bfloat16, device="meta", max_model_len=plan.max_model_len)
    assert plan.model.weights_bytes == meta.weights_bytes()


def test_a_plan_for_a_gpu_counts_the_experts_of_all_rows(tmp_path: Path) -> None:
    """In the largest step and in the largest graph, which has as many rows, each row has `top_k` experts at once."""
    model = load_model_config(resolve_model(str(make_tiny("qwen3_moe", tmp_path))))

    def experts_bytes(ranks: int) -> int:
        config = EngineConfig(max_num_batched_tokens=100, max_num_seqs=8, dtype="bfloat16")
        plan = plan_memory(config, DryGpu(), model, group=Group(0, ranks))
        return plan.model.reserve_bytes - step_bytes(replace(config, max_model_len=128), model, torch.bfloat16)

    hf = model.hf
    for ranks in (1, 2):
        values = hf["num_experts_per_tok"] * (3 * hf["moe_intermediate_size"] // ranks + model.hidden_size)
        assert experts_bytes(ranks) == (100 + 100) * values * 2


def test_a_plan_for_a_gpu_counts_the_graphs_of_a_draft_model(folder: Path) -> None:
    """Graphs of two models share no memory, while the other steps of the two never run at a time."""
    files = resolve_model(str(folder))
    model = load_model_config(files)
    config = EngineConfig(max_model_len=64, dtype="bfloat16")
    draft = Checkpoint(files=files, config=model, stored={})
    one, two = (plan_memory(config, DryGpu(), model, draft=each).model.reserve_bytes for each in (None, draft))
    eager = step_bytes(replace(config, enforce_eager=True), model, torch.bfloat16)
    assert two - one == step_bytes(config, model, torch.bfloat16) - eager > 0


def test_fp16_checkpoints_stay_fp16(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        **{n: config[n] for n in ("vocab_size", "hidden_size", "max_position_embeddings")},
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "hf": config,
    }
    for saved, want in (("float16", torch.float16), ("float32", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        assert CudaDevice().default_dtype(ModelConfig(dtype=saved, **sizes)) == want


def test_the_largest_step_grows_with_tokens_and_rows(folder: Path) -> None:
    model = load_model_config(resolve_model(str(folder)))

    def needed(tokens: int, rows: int) -> int:
        config = EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=rows)
        return step_bytes(config, model, torch.bfloat16)

    a_token = needed(3001, 10) - needed(3000, 10)
    assert a_token == needed(2050, 10) - needed(2049, 10) > 2 * 4 * model.hidden_size
    in_place = 2 * model.hidden_size + 4 * 4  # of a further token of the largest graph, beside its step
    assert needed(601, 10) - needed(600, 10) == 2 * a_token + in_place
    partial, tables = 14 * 4 * model.num_heads * (model.head_dim + 2), 4 * 4 * (model.max_position_embeddings // 16 + 1)
    of_a_row = (3 * 4 + 2) * model.vocab_size + 2 * model.hidden_size + partial + tables + 2 * 4
    assert needed(3000, 11) - needed(3000, 10) == of_a_row


def test_the_plan_has_the_memory_of_all_graphs(folder: Path) -> None:
    """It counts the tensors of `GraphedSteps`, the hidden rows of each graph, and the largest step a second time."""
    model = load_model_config(resolve_model(str(folder)))
    limits = StepLimits(max_num_seqs=300, max_model_len=64, table_width=5)
    buckets = [*decode_buckets(capture_sizes(300)), *prompt_buckets(300, 4096)]
    graphs = GraphedSteps(
        *(None, limits, buckets, None, torch.device("meta")),  # type: ignore[arg-type]
        overwrite=Tensor.copy_,
        free_bytes=lambda: 0,
    )
    settings: dict[str, Any] = {"max_num_seqs": 300, "max_model_len": 64, "max_num_batched_tokens": 4096}
    planned, eager = (
        step_bytes(EngineConfig(**settings, enforce_eager=each), model, torch.bfloat16) for each in (False, True)
    )
    values = sum(shape.in_features + shape.out_features for shape in layer_shapes(model)) + 4 * model.hidden_size
    rows = sum(bucket.num_tokens for bucket in buckets) * model.hidden_size + 2048 * values
    in_place = graphs._tables.numel() + graphs._numbers.numel()
    parts = 14 * 4 * model.num_heads * (model.head_dim + 2)  # of the sequence of padding
    assert planned - eager == 2 * rows + 4 * in_place + parts


def test_only_cuda_errors_lose_the_device() -> None:
    assert is_cuda_failure(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert is_cuda_failure(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"))
    assert is_cuda_failure(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not is_cuda_failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_cuda_failure(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert not is_cuda_failure(ValueError("CUDA error"))
    assert not is_cuda_failure(RuntimeError("shape mismatch"))


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_serving_on_a_missing_gpu_fails_with_one_line(folder: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "octavo_server.cli.main", "serve", str(folder), "--device", "cuda", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "--device cuda" in line]
    assert len(said) == 1
    assert str(find_cuda_problem()) in said[0]
    assert "--device cpu" in said[0]


def test_results_that_cannot_be_pinned_are_copied_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("cannot allocate pinned memory\nmore")

    monkeypatch.setattr(torch, "empty", refuse)
    device, values = CudaDevice(), torch.arange(3)
    assert [device.fetch()(values)().tolist() for _ in range(3)] == [[0, 1, 2]] * 3
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith("cannot allocate pinned memory")


@pytest.mark.parametrize("reason", ["cannot pin memory", ""])
def test_inputs_and_blocks_that_cannot_be_pinned_cost_one_warning_each(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(reason)

    def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError(reason)
        return torch.empty(shape, dtype=dtype).zero_()

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    monkeypatch.setattr(torch, "zeros", zeros)
    device = CudaDevice()
    device.input_copy()._device = torch.device("cpu")  # type: ignore[attr-defined]
    assert [device.input_copy()(torch.arange(3)).tolist() for _ in range(3)] == [[0, 1, 2]] * 3
    assert device.host_blocks(2, 3).tolist() == [[0, 0, 0]] * 2
    inputs, swap = (record.getMessage() for record in caplog.records)
    assert inputs == f"inputs of steps are not pinned, so copies to the GPU are slower: {reason or 'RuntimeError'}"
    assert swap == f"swap space is not pinned, so swapping is slower: {reason or 'RuntimeError'}"
