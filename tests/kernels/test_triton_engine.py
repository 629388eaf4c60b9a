"""The whole engine with the Triton kernels, in the interpreter, gives the tokens of the CPU's kernels."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from octavo_engine import LLM, LoRARequest, SamplingParams
from octavo_engine.ops.packed_linear import plain_weight
from octavo_engine.runner import adapter_weights
from octavo_testing.lora_adapters import TARGETS, make_adapter
from octavo_testing.tiny_models import make_tiny
from octavo_testing.triton_device import triton_kernels

PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (25, 16, 3)]


def generate(
    folder: Path, attention: AbstractContextManager[None], adapters: Sequence[LoRARequest | None] | None = None
) -> list[list[int]]:
    settings = {"max_num_batched_tokens": 20, "max_num_seqs": 4, "num_gpu_blocks_override": 16}
    with attention:
        llm = LLM(str(folder), dtype="float32", enable_lora=adapters is not None, **settings)
        params = [
            SamplingParams(temperature=0, max_tokens=4),
            SamplingParams(temperature=0.8, seed=3, max_tokens=4),
            SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=1, max_tokens=4),
        ]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters)
        llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


def test_an_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = make_tiny("gemma2", tmp_path)
    assert generate(folder, triton_kernels()) == generate(folder, nullcontext())


@pytest.mark.slow
def test_adapters_with_plain_weights_as_on_a_gpu_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny("llama", tmp_path)
    adapter = make_adapter("llama", tmp_path / "adapter", list(TARGETS["llama"]), rank=8, seed=1)
    adapters = [LoRARequest("a", 1, str(adapter)), None, LoRARequest("a", 1, str(adapter))]
    expected = generate(folder, nullcontext(), adapters)
    assert expected != generate(folder, nullcontext())
    monkeypatch.setattr(adapter_weights, "pack", lambda weight: plain_weight(weight, None))
    assert generate(folder, triton_kernels(), adapters) == expected
