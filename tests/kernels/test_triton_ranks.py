"""Ranks with the Triton kernels, in the interpreter: the path of several GPUs, except NCCL, for which gloo stands."""

from pathlib import Path

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.ops.cuda_backend import CudaBackend
from octavo_engine.ops.rank_group import Group
from octavo_engine.sources.resolve import resolve_model
from octavo_testing.late_nccl import late_nccl
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import BLOCK, FEEDS, all_logits, expected_logits
from octavo_testing.ranks import load_part, run_ranks
from octavo_testing.thread_ranks import ranks_on_gpu_stand_ins
from octavo_testing.tiny_models import TINY, make_tiny
from octavo_testing.triton_device import one_launch_at_a_time, triton_kernels
from torch import Tensor

GPU = torch.device("cpu")  # stands for it
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (25, 16, 3)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=4),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=1, prompt_logprobs=1, max_tokens=4),
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in TINY])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    files, (tokens, expected) = resolve_model(str(folder)), expected_logits(folder)

    def logits(group: Group) -> Tensor:
        model = load_part(files, group, max_model_len=TINY[name].max_model_len)
        backend = CudaBackend(model.kv_specs(), BLOCK, torch.float32, "cpu", num_programs=5)
        return all_logits(PagedDriver(model, block_size=BLOCK, backend=backend), tokens, FEEDS["chunks_at_block_edges"])

    with triton_kernels(), one_launch_at_a_time(), late_nccl():
        found = run_ranks(2, logits, gpu=GPU)
    assert (found[0] - expected).abs().max() <= 1e-4
    assert found[1].shape[-1] == 0


def generate(model: str, size: int) -> list[list[int]]:
    llm = LLM(
        model,
        dtype="float32",
        tensor_parallel_size=size,
        num_threads=size,
        max_num_batched_tokens=20,
        max_num_seqs=4,
        num_gpu_blocks_override=4,
        max_model_len=64,
        swap_space=0.001,
        preemption_mode="swap",
    )
    try:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.stats.preemptions_swap
        return [each.outputs[0].token_ids for each in outputs]
    finally:
        llm.shutdown()


def test_an_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    """Ranks compile before they are ready, take prompts in chunks, and swap."""
    model = str(make_tiny("qwen3", tmp_path))
    one = generate(model, 1)
    with triton_kernels(), one_launch_at_a_time(), late_nccl() as groups, ranks_on_gpu_stand_ins():
        assert generate(model, 2) == one
    assert len(groups) == 2
