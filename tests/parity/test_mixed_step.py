"""Requests with all features of a step, together in each step, have the tokens of a golden file.

The file was written before decode steps kept arrays of their sequences.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import octavo_engine.loop.proposers
import pytest
from octavo_engine import LLM, SamplingParams
from octavo_engine.lora.request import LoRARequest
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.adapter_files import llama_pairs, write_adapter
from octavo_testing.tiny_models import make_tiny

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5},
    "grammar": {"temperature": 1.0, "seed": 4, "structured_outputs": StructuredOutputs(regex="[a-z ]{10,40}")},
    "penalties": {"temperature": 0.7, "seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.6, "logprobs": 2},
    "biased": {"temperature": 1.0, "seed": 8, "logit_bias": {9: 2.0}, "min_tokens": 9, "presence_penalty": -0.5},
    "several": {"temperature": 1.1, "n": 3, "seed": 6},
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_tokens_of_steps_with_all_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[[str, str], None]
) -> None:
    monkeypatch.setattr(octavo_engine.loop.proposers, "least_share", lambda num_seqs, costs: 0.0)  # always draft
    adapters = [write_adapter(tmp_path / f"adapter{i}", llama_pairs(seed=i)) for i in (1, 2)]
    loras = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, 1))]
    cases = [(name, lora) for lora in loras for name in KINDS]
    prompts = [{"prompt_token_ids": [3 + (7 * i + j % 5) % 60 for j in range(12 + i)]} for i in range(len(cases))]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **KINDS[name]) for name, _ in cases]
    llm = LLM(
        str(make_tiny("llama", tmp_path)), dtype="float32", num_gpu_blocks_override=400, max_num_seqs=64,
        enable_lora=True, max_loras=2, speculative_config=DRAFTS, debug_invariants=True,
    )  # fmt: skip
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[lora for _, lora in cases])
        assert sum(llm.stats.accepted_draft_tokens) > 0
    finally:
        llm.shutdown()
    lines = []
    for (name, lora), output in zip(cases, outputs, strict=True):
        for completion in output.outputs:
            tops = [" ".join(map(str, sorted(entries))) for entries in completion.logprobs or []]
            tokens = " ".join(map(str, completion.token_ids))
            lines.append(f"{name}, {lora.lora_name if lora else 'no adapter'}: {tokens}; {', '.join(tops)}\n")
    golden("mixed_step.txt", "".join(lines))
