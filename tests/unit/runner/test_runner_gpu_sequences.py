"""The default number of sequences depends on the GPU; all graphs up to it are captured before an engine is ready."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.devices import device as device_module
from octavo_engine.devices.cuda_device import CudaDevice, step_bytes
from octavo_engine.devices.cuda_graphs import GraphedSteps, capture_sizes, decode_buckets
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.memory import GIB, MemoryInfo
from octavo_engine.devices.step_inputs import RunnableModel, StepLimits
from octavo_engine.loop.start import scheduler_config
from octavo_engine.ops.attention import AttentionBackend, AttentionBatch, AttentionSpec, LayerKVSpec
from octavo_engine.ops.reference import ReferenceBackend
from octavo_engine.runner.capacity import plan_capacity
from octavo_engine.runner.kv_cache_size import with_max_num_seqs
from octavo_engine.runner.load import load
from octavo_engine.settings.config import EngineConfig, most_seqs, with_ready
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import InvalidRequest
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_server.cli.dry_run import dry_run
from octavo_testing.tiny_models import make_tiny
from torch import Tensor

GPU = MemoryInfo(total_bytes=80 * GIB, available_bytes=79 * GIB, utilization=0.9)
SMALL_GPU = MemoryInfo(total_bytes=69 * GIB, available_bytes=68 * GIB, utilization=0.9)
CPU = MemoryInfo(total_bytes=800 * GIB, available_bytes=700 * GIB)


class CountingCapture:
    """Stand in for the capture of CUDA graphs: counts captures and replays; a replay leaves the output as it was."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captures += 1
        return self._replay, work()

    def _replay(self) -> None:
        self.replays += 1


class NoAttention(ReferenceBackend):
    """Costs nothing: outputs are the queries."""

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        return q.clone()


class LargeGpu(CpuDevice):
    """Computes on the CPU; memory, first steps and graphs are those of a GPU of 80 GiB."""

    capture = CountingCapture()
    cuda_memory = GPU

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.compiles_late = True

    def memory(self, num_ranks: int = 1) -> MemoryInfo:
        return self.cuda_memory

    def attention_backend(self, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> AttentionBackend:
        return NoAttention(specs, block_size, dtype)

    def input_copy(self) -> Callable[[Tensor], Tensor]:
        return torch.clone

    def step_graphs(self, model: RunnableModel, limits: StepLimits) -> GraphedSteps:
        buckets = decode_buckets(capture_sizes(limits.max_num_seqs))
        return GraphedSteps(
            *(model.forward, limits, buckets, self.capture, self.torch_device),
            overwrite=Tensor.copy_,
            free_bytes=lambda: 0,
        )


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> CountingCapture:
    made = CountingCapture()
    monkeypatch.setattr(LargeGpu, "capture", made)
    monkeypatch.setattr(device_module, "CpuDevice", LargeGpu)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models"))


def settings(folder: Path, **fields: Any) -> dict[str, Any]:
    return {
        "model": str(folder), "dtype": "float32", "num_threads": 1, "device": "cpu", "num_gpu_blocks_override": 33,
        **fields,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "fields", "want"),
    [
        (GPU, {}, 1024),
        (GPU, {"max_num_batched_tokens": 1024}, 1024),
        (GPU, {"max_num_batched_tokens": 1023}, 256),
        (GPU, {"max_num_seqs": 3}, 3),
        (GPU, {"max_num_seqs": 4096}, 4096),
        (SMALL_GPU, {}, 256),
        (SMALL_GPU, {"max_num_seqs": 600}, 600),
        (CPU, {}, 256),
    ],
)
def test_the_default_number_of_sequences_depends_on_the_gpu(
    memory: MemoryInfo, fields: dict[str, Any], want: int
) -> None:
    assert with_max_num_seqs(EngineConfig(**fields), memory).max_num_seqs == want


@pytest.mark.parametrize(("memory", "want"), [(GPU, 1024), (SMALL_GPU, 256)])
def test_all_that_use_the_number_have_that_of_the_start(
    memory: MemoryInfo, want: int, folder: Path, capture: CountingCapture, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(LargeGpu, "cuda_memory", memory)
    config = EngineConfig(**settings(folder, max_num_batched_tokens=2048))
    llm = LLM(**settings(folder, max_num_batched_tokens=2048))
    assert capture.captures == len(capture_sizes(want))
    assert (llm.ready_info.max_num_seqs, llm.config.max_num_seqs) == (want, want)
    assert scheduler_config(config, llm.ready_info).max_num_seqs == want
    assert plan_capacity(config).max_num_seqs == want
    with pytest.raises(InvalidRequest, match=f"the limit is {want}:"):
        llm.generate([[5]], SamplingParams(n=want + 1), use_tqdm=False)
    llm.shutdown()
    assert dry_run(config, argparse.Namespace(json=False)) == 0
    assert f"at most {want} (--max-num-seqs)" in capsys.readouterr().out


def test_the_number_of_the_core_replaces_only_a_default() -> None:
    ready = ReadyInfo(
        max_model_len=64, num_blocks=9, num_host_blocks=0, block_size=16, dtype="bfloat16", kv_dtype="bfloat16",
        device="cuda", weights_fingerprint="f", hash_root=b"", weights_bytes=1, kv_bytes=1, max_num_seqs=1024,
    )  # fmt: skip
    assert most_seqs(with_ready(EngineConfig(), ready)) == 1024
    assert most_seqs(with_ready(EngineConfig(max_num_seqs=7), ready)) == 7
    assert scheduler_config(EngineConfig(max_num_seqs=7), ready).max_num_seqs == 7
    assert most_seqs(EngineConfig()) == 256


def test_the_largest_step_has_room_for_all_graphs(folder: Path) -> None:
    model = load_model_config(resolve_model(str(folder)))

    def needed(**fields: Any) -> int:
        return step_bytes(EngineConfig(max_model_len=64, **fields), model, torch.bfloat16)

    hidden = 2 * model.hidden_size
    few, many = ({"max_num_seqs": 1024, "cudagraph_capture_sizes": sizes} for sizes in ((1024,), (512, 1024)))
    assert needed(**many) - needed(**few) == 512 * hidden  # a further graph has its own output
    assert needed(max_num_seqs=1024) == needed(max_num_seqs=1024, cudagraph_capture_sizes=tuple(capture_sizes(1024)))
    assert needed(max_num_seqs=1024) - needed(max_num_seqs=1024, enforce_eager=True) > 1024 * hidden
    assert CudaDevice().reserve_bytes(EngineConfig(), model, torch.bfloat16) > needed(max_num_seqs=1)


def test_logits_are_counted_as_many_as_are_computed_at_a_time(folder: Path) -> None:
    model = load_model_config(resolve_model(str(folder)))
    object.__setattr__(model, "vocab_size", 1 << 18)  # 256 rows of logits at a time

    def needed(rows: int) -> int:
        config = EngineConfig(max_model_len=1, max_num_seqs=rows, enforce_eager=True)
        return step_bytes(config, model, torch.bfloat16)

    count, row = 2 * model.vocab_size, (3 * 4 + 2) * model.vocab_size
    assert row <= needed(256) - needed(255) < row + 10_000
    assert needed(1024) - needed(256) < 768 * count + 10 * row


@pytest.mark.parametrize("num_seqs", [1, 256, 512, 600, 1024])
def test_all_graphs_are_captured_before_the_engine_is_ready(
    folder: Path, capture: CountingCapture, num_seqs: int
) -> None:
    sizes = capture_sizes(num_seqs)
    assert sizes[-1] == num_seqs
    executor, ready = load(EngineConfig(**settings(folder, max_num_seqs=num_seqs, max_num_batched_tokens=128)))
    assert (ready.max_num_seqs, ready.num_blocks) == (num_seqs, 33)
    assert (capture.captures, capture.replays) == (len(sizes), 0)
    runner = executor._runner
    params = SamplingParams(temperature=0)
    new = [NewSeq(seq_id=i, token_ids=[5], num_prompt_tokens=1, params=params) for i in range(num_seqs)]
    prompts = [SeqStep(seq_id=i, start=0, num_tokens=1, sample=True, block_ids=[[i % 33]]) for i in range(num_seqs)]
    assert runner.run(StepPlan(step_id=0, new_seqs=new, seqs=prompts)).error is None
    replayed = capture.replays
    decodes = [SeqStep(seq_id=i, start=1, num_tokens=1, sample=True) for i in range(num_seqs)]
    counts = sorted({1, *sizes, *(size + 1 for size in sizes[:-1])})  # the least and the most rows of each graph
    for count in counts:
        assert runner.run(StepPlan(step_id=0, seqs=decodes[:count])).error is None
    assert capture.captures == len(sizes)
    assert capture.replays - replayed == len(counts)
    executor.shutdown()
