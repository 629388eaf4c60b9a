"""SmolLM2 with n-gram drafts: ids, texts and finish reasons equal those without, and drafts are accepted."""

from collections.abc import Iterator
from typing import Any

import pytest
from octavo_engine import LLM, SamplingParams
from octavo_testing.copy_prompts import COPY_PROMPTS, outputs_of

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1, "seed": 5},
    "nucleus": {"temperature": 1, "top_p": 0.9, "top_k": 40, "seed": 6},
    "forks": {"temperature": 1, "n": 3, "seed": 7},
    "stop-strings": {"temperature": 0, "stop": ["height", "stock", "ships on T", "sugar"]},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "masks": {"temperature": 0, "bad_words": ["price"], "min_tokens": 20, "logit_bias": {30: -5.0}},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1},
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}


def open_llm(**settings: Any) -> LLM:
    return LLM(dtype="bfloat16", max_model_len=1024, kv_cache_memory_bytes=1 << 28, debug_invariants=True, **settings)


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    # Logits are equal bit for bit; torch's sums for log-probabilities may differ between one row and several.
    plain, drafting = (open_llm(logprobs_mode="raw_logits", speculative_config=value) for value in (None, DRAFTS))
    yield plain, drafting
    plain.shutdown()
    drafting.shutdown()


@pytest.mark.parametrize("crowded", [False, True], ids=["alone", "all-at-once"])
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_change_no_output(llms: tuple[LLM, LLM], name: str, crowded: bool) -> None:
    params = SamplingParams(max_tokens=64, **SETTINGS[name])
    plain, drafting = llms
    groups = [COPY_PROMPTS] if crowded else [[prompt] for prompt in COPY_PROMPTS]
    before = sum(drafting.stats.accepted_draft_tokens)
    for group in groups:
        want, got = (outputs_of(llm.generate(group, params, use_tqdm=False)) for llm in (plain, drafting))
        assert got == want
    accepted = sum(drafting.stats.accepted_draft_tokens) - before
    assert accepted > 100
