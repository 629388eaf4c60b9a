"""Whole engines with an FP8 cache, in the interpreter: their tokens are those of keys and values rounded to e4m3."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.devices.device import CpuDevice
from octavo_engine.ops.attention import LayerKVSpec
from octavo_testing.attention_cases import E4M3Reference
from octavo_testing.decode_pairs import Pair, make_long_tiny
from octavo_testing.tiny_models import make_tiny
from octavo_testing.triton_device import TritonGraphs, triton_kernels

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (25, 16, 3)]


def rounded_attention() -> AbstractContextManager[Any]:
    """Let engines attend in torch to keys and values that are rounded to e4m3."""

    def backend(self: CpuDevice, specs: list[LayerKVSpec], block_size: int, dtype: torch.dtype) -> E4M3Reference:
        assert dtype == torch.float8_e4m3fn
        return E4M3Reference(specs, block_size)

    return patch.object(CpuDevice, "attention_backend", backend)


def generate(
    folder: Path, attention: AbstractContextManager[Any], params: list[SamplingParams], **fields: Any
) -> tuple[list[list[list[int]]], int]:
    """Return the tokens of all sequences, and the number of preemptions."""
    sizes = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "num_gpu_blocks_override": 16, **fields}
    with attention:
        llm = LLM(str(folder), dtype="float32", kv_cache_dtype="fp8", **sizes)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        preemptions = sum(each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions")
        llm.shutdown()
    return [[sequence.token_ids for sequence in output.outputs] for output in outputs], preemptions


@pytest.mark.parametrize("architecture", ["gemma2", "qwen3", "deepseek_v3"])
def test_an_engine_gives_the_tokens_of_rounded_keys_and_values(architecture: str, tmp_path: Path) -> None:
    """DeepSeek is run by transformers; its values are narrower than its keys."""
    folder = make_tiny(architecture, tmp_path)
    params = [
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(temperature=0.8, seed=3, max_tokens=4),
        SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=4),
    ]
    found, _ = generate(folder, triton_kernels(), params)
    assert found == generate(folder, rounded_attention(), params)[0]


def test_graphs_over_an_fp8_cache_equal_eager_steps(tmp_path: Path) -> None:
    folder = make_long_tiny("qwen3", tmp_path, max_model_len=90)
    with triton_kernels():
        pair = Pair.open(folder, device=TritonGraphs, dtype="float32", max_num_seqs=3, kv_cache_dtype="fp8")
        pair.mix_randomly(3, seed=2, most=3)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_forks_and_preempted_sequences_keep_their_tokens(mode: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    params = [SamplingParams(temperature=0.8, seed=seed, n=2, max_tokens=9) for seed in range(len(PROMPTS))]
    narrow = {"num_gpu_blocks_override": 5, "max_model_len": 40, "swap_space": 0.001, "preemption_mode": mode}
    found, preemptions = generate(folder, triton_kernels(), params, **narrow)
    wide, none = generate(folder, rounded_attention(), params, max_num_seqs=8)
    assert found == wide
    assert preemptions > none == 0
