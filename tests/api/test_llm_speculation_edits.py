"""Drafts of requests whose logits are edited: grammars, penalties, masks and limits on reasoning."""

from collections.abc import Iterator
from typing import Any

import octavo_engine.ngram
import pytest
from octavo_engine import LLM, SamplingParams
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.copy_prompts import COPY_PROMPTS, outputs_of

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

PROMPTS = [*COPY_PROMPTS, *(f"A note.\n\n{prompt}" for prompt in COPY_PROMPTS)]
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
SETTINGS: dict[str, dict[str, Any]] = {
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
    common: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 28}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(octavo_engine.ngram, "least_share", lambda num_seqs, costs: 0.0)  # in a crowd, too
        plain, drafting = (LLM(**common, debug_invariants=True, speculative_config=value) for value in (None, DRAFTS))
        yield plain, drafting
        plain.shutdown()
        drafting.shutdown()


@pytest.mark.parametrize("crowded", [False, True], ids=["alone", "all-at-once"])
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_change_no_edited_output(llms: tuple[LLM, LLM], name: str, crowded: bool) -> None:
    params = SamplingParams(**{"max_tokens": 32, "temperature": 0} | SETTINGS[name])
    plain, drafting = llms
    before = sum(drafting.stats.accepted_draft_tokens)
    for group in [PROMPTS] if crowded else [[prompt] for prompt in PROMPTS]:
        want, got = (outputs_of(llm.generate(group, params, use_tqdm=False)) for llm in (plain, drafting))
        assert got == want
    assert sum(drafting.stats.accepted_draft_tokens) - before > 50
