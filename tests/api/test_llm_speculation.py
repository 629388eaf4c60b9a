"""SmolLM2 with n-gram drafts: ids, texts and finish reasons equal those without, and drafts are accepted."""

from collections.abc import Iterator
from typing import Any

import octavo_engine.loop.proposers
import pytest
from octavo_engine import LLM, SamplingParams
from octavo_engine.wire.structured import StructuredOutputs
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
STOCK = {"type": "object", "properties": {"berlin": {"type": "integer"}, "paris": {"type": "integer"}}}
LAMP = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "price": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "stock": STOCK,
    },
    "required": ["name", "price"],
}
NEWLINE = 198  # ends the reasoning
EDITS: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": StructuredOutputs(json=LAMP)},
    "regex": {"structured_outputs": StructuredOutputs(regex=r"[a-zA-Z0-9 ,.(){}*:;\"\[\]_\n-]{8,200}")},
    "drawn-regex": {
        "structured_outputs": StructuredOutputs(regex=r"[^x]{8,200}"), "temperature": 0.7, "seed": 3, "min_tokens": 30,
    },
    "grammar-after-reasoning": {
        "structured_outputs": StructuredOutputs(regex=r"[^y]{30,200}"), "reasoning_end_token_id": NEWLINE,
    },
    "repetition": {"repetition_penalty": 1.05},
    "frequency": {"frequency_penalty": 0.2, "presence_penalty": -0.3, "temperature": 0.7, "seed": 4},
    "bad-words": {"bad_words": ["price", " height", "11 ships"]},
    "min-tokens": {"min_tokens": 30, "stop_token_ids": [NEWLINE, 28]},
    "logit-bias": {"logit_bias": {30: -5.0, NEWLINE: 3.0}},
    "thinking-budget": {"thinking_token_budget": 11, "reasoning_end_token_id": NEWLINE},
}  # fmt: skip
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    """An engine without drafts, and one that proposes them whether they pay or not."""
    # Logits are equal bit for bit; torch's sums for log-probabilities may differ between one row and several.
    common: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28}
    common |= {"logprobs_mode": "raw_logits", "debug_invariants": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(octavo_engine.loop.proposers, "least_share", lambda num_seqs, costs: 0.0)
        plain, drafting = (LLM(**common, speculative_config=value) for value in (None, DRAFTS))
        yield plain, drafting
        plain.shutdown()
        drafting.shutdown()


def count_accepted(llms: tuple[LLM, LLM], prompts: list[str], params: SamplingParams, *, crowded: bool) -> int:
    """Assert that both engines give equal outputs; return how many drafts were accepted."""
    plain, drafting = llms
    before = sum(drafting.stats.accepted_draft_tokens)
    for group in [prompts] if crowded else [[prompt] for prompt in prompts]:
        want, got = (outputs_of(llm.generate(group, params, use_tqdm=False)) for llm in (plain, drafting))
        assert got == want
    return sum(drafting.stats.accepted_draft_tokens) - before


@pytest.mark.parametrize("crowded", [False, True], ids=["alone", "all-at-once"])
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_change_no_output(llms: tuple[LLM, LLM], name: str, crowded: bool) -> None:
    params = SamplingParams(max_tokens=64, **SETTINGS[name])
    assert count_accepted(llms, COPY_PROMPTS, params, crowded=crowded) > 80


@pytest.mark.parametrize("crowded", [False, True], ids=["alone", "all-at-once"])
@pytest.mark.parametrize("name", EDITS)
def test_drafts_change_no_edited_output(llms: tuple[LLM, LLM], name: str, crowded: bool) -> None:
    prompts = [*COPY_PROMPTS, *(f"A note.\n\n{prompt}" for prompt in COPY_PROMPTS)]
    params = SamplingParams(**{"max_tokens": 32, "temperature": 0} | EDITS[name])
    assert count_accepted(llms, prompts, params, crowded=crowded) > 50
