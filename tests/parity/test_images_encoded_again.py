"""Rows of images between requests: an image is encoded once while it is cached, and again after it was dropped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, RequestOutput, SamplingParams
from octavo_testing.tiny_models import VOCAB
from octavo_testing.tiny_vision import IMAGE, TEXT, ImagePrompt, Reference, image_prompt, make_tiny_vision, picture

pytestmark = pytest.mark.slow

LENGTH = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision("smolvlm", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Return an engine with blocks for one request of full length."""
    common: dict[str, Any] = {"dtype": "float32", "max_logprobs": -1, "debug_invariants": True, "max_model_len": LENGTH}
    made = LLM(str(folder), num_gpu_blocks_override=-(-LENGTH // 16), **(common | request.param))
    yield made
    made.shutdown()


def text(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer(llm: LLM, *asked: ImagePrompt, max_tokens: int = 4) -> list[RequestOutput]:
    no_image = {IMAGE: -100.0}  # in an output, which the reference would take for an image
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=-1, logit_bias=no_image)
    return llm.generate([each.request for each in asked], params, use_tqdm=False)


def rows(output: RequestOutput) -> torch.Tensor:
    """Return the log-probabilities of the vocabulary for each generated token."""
    return torch.tensor([[row[i].logprob for i in range(TEXT["vocab_size"])] for row in output.outputs[0].logprobs])


def check(reference: Reference, asked: ImagePrompt, output: RequestOutput) -> None:
    prompt, found = list(output.prompt_token_ids), output.outputs[0]
    expected = reference.logits([*prompt, *found.token_ids], asked.images).log_softmax(-1)
    assert (rows(output) - expected[len(prompt) - 1 : -1]).abs().max() <= 1e-4


@pytest.mark.parametrize("llm", [{"max_num_batched_tokens": 256, "enable_sleep_mode": True}], indirect=True)
def test_conversations_encode_each_image_once_until_a_sleep_frees_its_rows(llm: LLM, reference: Reference) -> None:
    shown = [picture(number) for number in (1, 2, 3)]
    for turn in range(20):
        for number, data in enumerate(shown):
            asked = image_prompt(text(5, seed=number), data, text(100 + turn, seed=number))
            (output,) = answer(llm, asked)
            assert output.num_cached_tokens == 0, "the blocks of the turn before are evicted"
    assert llm.stats.encoded_images == 3
    assert llm.stats.encode_s > 0
    assert llm.stats.encoder_usage > 0
    check(reference, asked, output)
    for level in (1, 2):
        llm.sleep(level=level)
        assert not llm._core._executor._images._rows
        assert llm.stats.encoder_usage == 0
        llm.wake_up()
        (again,) = answer(llm, asked)
        assert torch.equal(rows(again), rows(output))
        assert llm.stats.encoded_images == 3 + level


@pytest.mark.parametrize(
    "llm", [{"max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_prefix_caching": False}], indirect=True
)
def test_images_that_were_dropped_are_encoded_again_for_preempted_sequences(llm: LLM, reference: Reference) -> None:
    """The cache has room for one image."""
    batch = [image_prompt(text(3, seed=number), picture(number), text(5, seed=9)) for number in (1, 2, 3)]
    outputs = answer(llm, *batch, max_tokens=60)
    assert llm.stats.preemptions > 0
    assert llm.stats.encoded_images > 3
    for asked, output in zip(batch, outputs, strict=True):
        check(reference, asked, output)
