"""The kernels of a step compile for a GPU, without one: no spills, fast copies, and nothing compiled while serving."""

import pytest
import torch
from octavo_engine.ops.attention import AttentionBatch, AttentionSpec
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_testing.gpu_compiler import MetaSteps, assert_fast, compile_steps, even_counts
from torch import Tensor


def test_a_model_compiles_for_hopper() -> None:
    report = compile_steps("Qwen3ForCausalLM", sm=90)
    attention = ["write_qkv_kernel", "decode_parts_kernel", "merge_parts_kernel"]
    norm, linear = "rms_norm_kernel", "aten::linear"
    layer = [norm, linear, *attention, linear, norm, linear, "gate_kernel", linear]
    assert report.layer_launches == [layer] * 2
    assert {kernel.name for kernel in report.kernels} == {*layer, "paged_attention_kernel"} - {linear}
    assert report.later == 0, "numbers of sequences and blocks compile no kernel again"
    assert_fast(report)


@pytest.fixture
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels, which would start in the interpreter, for steps on the `meta` device."""
    monkeypatch.setattr("octavo_engine.ops.cuda_backend.write_qkv", lambda cache, qk, *_: qk[:, : -cache.shape[2]])
    monkeypatch.setattr("octavo_engine.ops.cuda_backend.paged_attention", lambda *arguments: None)
    monkeypatch.setattr("octavo_engine.ops.cuda_backend.decode_attention", lambda *arguments: None)


@pytest.fixture
def steps(_no_kernels: None) -> MetaSteps:
    return MetaSteps("Qwen3ForCausalLM", torch.bfloat16)


def run(steps: MetaSteps) -> Tensor:
    return steps.run(seqs=3, tokens=40, max_query_len=30, table_width=5)


def test_a_step_reads_nothing_back_to_the_host(steps: MetaSteps) -> None:
    logits = run(steps)
    assert (logits.dtype, logits.shape) == (torch.float32, (3, steps.model.config.vocab_size))


@pytest.mark.usefixtures("_no_kernels")
def test_a_step_with_experts_reads_only_their_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = MetaSteps("Qwen2MoeForCausalLM", torch.bfloat16)
    with pytest.raises(NotImplementedError, match="aten::bincount"):
        run(steps)
    monkeypatch.setattr("octavo_engine.layers.moe.count_rows", even_counts)
    assert run(steps).dtype == torch.float32


def test_a_planted_synchronisation_fails(steps: MetaSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(self: CudaBackend, spec: AttentionSpec, q: Tensor, batch: AttentionBatch) -> Tensor:
        return q * batch.seq_lens.max().item()

    monkeypatch.setattr(CudaBackend, "_attend", attend)
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        run(steps)


def test_a_planted_tensor_of_the_host_fails(steps: MetaSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(self: CudaBackend, spec: AttentionSpec, q: Tensor, batch: AttentionBatch) -> Tensor:
        return q + torch.ones(q.shape[1:], dtype=q.dtype)

    monkeypatch.setattr(CudaBackend, "_attend", attend)
    with pytest.raises(RuntimeError, match="device"):
        run(steps)
