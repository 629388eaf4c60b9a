"""The cache of processed images in `LLM`: 20 turns about 3 images, without a cache, by tenant, and after a reset."""

from pathlib import Path
from typing import Any

import pytest
from octavo_engine import LLM, SamplingParams
from octavo_testing.tiny_vision import ImagePrompt, image_prompt, make_tiny_vision, picture

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
TURNS = [image_prompt([5], *map(picture, (1, 2, 3)), [6, 7, turn + 8]) for turn in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision("smolvlm", tmp_path_factory.mktemp("vision"))


def answer(llm: LLM, prompt: ImagePrompt, **fields: Any) -> list[int]:
    (output,) = llm.generate([prompt.request | fields], PARAMS, use_tqdm=False)
    assert output.error is None
    return output.outputs[0].token_ids


def ask_in_turn(folder: Path, **arguments: Any) -> tuple[list[list[int]], int, int]:
    """Return the answers of 20 turns, and how many images were looked up and processed."""
    llm = LLM(str(folder), dtype="float32", max_model_len=256, **arguments)
    answers = [answer(llm, turn) for turn in TURNS]
    stats = llm.stats
    llm.shutdown()
    return answers, stats.mm_cache_queries, stats.mm_cache_queries - stats.mm_cache_hits


def test_20_turns_about_3_images_process_3(folder: Path) -> None:
    """Images whose blocks are all cached are not even looked up. Without a cache all answers are the same."""
    answers, looked_up, processed = ask_in_turn(folder)
    assert looked_up < 60
    assert processed == 3
    evicting = ask_in_turn(folder, enable_prefix_caching=False)
    assert evicting == (answers, 60, 3)
    assert ask_in_turn(folder, enable_prefix_caching=False, mm_processor_cache_gb=0) == (answers, 60, 60)
    assert ask_in_turn(folder, mm_processor_cache_gb=0)[0] == answers


def test_resets_and_salts_process_an_image_again(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", max_model_len=256, enable_prefix_caching=False)

    def counts() -> tuple[int, int]:
        """Return how many images were processed and encoded."""
        return llm.stats.mm_cache_queries - llm.stats.mm_cache_hits, llm.stats.encoded_images

    asked = image_prompt([5], picture(1), [6, 7])
    first = answer(llm, asked)
    assert (answer(llm, asked), counts()) == (first, (1, 1))
    assert (answer(llm, asked, cache_salt="tenant"), counts()) == (first, (2, 2))
    llm.reset_mm_cache()
    assert (answer(llm, asked), counts()) == (first, (3, 2))  # its rows stay
    llm.shutdown()


def test_images_of_preempted_requests_are_processed_again_when_needed(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", max_model_len=256, num_gpu_blocks_override=16, mm_processor_cache_gb=0)
    prompts = [image_prompt([5], picture(i), [6, 7]) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    together = llm.generate([prompt.request for prompt in prompts], params, use_tqdm=False)
    assert llm.stats.preemptions > 0
    assert llm.stats.mm_cache_queries > 6
    alone = [llm.generate([prompt.request], params, use_tqdm=False)[0] for prompt in prompts]
    assert [output.outputs[0].token_ids for output in together] == [output.outputs[0].token_ids for output in alone]
    llm.shutdown()
