"""Adapters of families that transformers runs, beside the base model: log-probabilities are those of peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, LoRARequest, SamplingParams
from octavo_engine.wire.errors import StartupError
from octavo_testing.adapter_files import write_adapter
from octavo_testing.lora_adapters import PeftOracle, make_adapter
from octavo_testing.tiny_models import VOCAB, make_tiny
from torch import Tensor

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
#: The router of the tiny GLM-4-MoE amplifies how norms round in fp32.
TOLERANCES = {"glm4_moe": 2e-4}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
#: Of families with experts, only modules that peft does not take for those of experts, too.
TARGETS = {
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
    "olmo3": (*ATTENTION, *GATED),
    "glm4_moe": ATTENTION,
    "minimax_m2": ATTENTION,
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}
PROMPTS = [list(range(5, 33)), list(range(60, 80))]


def logprobs(llm: LLM, adapter: Path | None, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Return all tokens but the last, and the log-probabilities after each of them."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=VOCAB, prompt_logprobs=VOCAB, ignore_eos=True)
    request = None if adapter is None else LoRARequest("x", 1, str(adapter))
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False, lora_request=request)
    assert output.error is None
    rows: list[Any] = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    found = torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in rows])
    return [*prompt, *output.outputs[0].token_ids][:-1], found


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_of_transformers_models_are_exact(family: str, tmp_path: Path) -> None:
    adapters = [
        make_adapter(family, tmp_path / str(rank), list(TARGETS[family]), rank=rank, seed=rank) for rank in (4, 24)
    ]
    oracle = PeftOracle(family)
    llm = LLM(
        str(make_tiny(family, tmp_path)),
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=24,
        num_threads=1,
        max_logprobs=-1,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=40,
        enable_sleep_mode=True,
    )

    def check() -> list[Tensor]:
        results = []
        for adapter in (adapters[0], None, adapters[1]):
            for prompt in PROMPTS:
                tokens, found = logprobs(llm, adapter, prompt)
                assert (found - oracle.logprobs(adapter, tokens)).abs().max() < TOLERANCES.get(family, TOLERANCE)
                results.append(found)
        return results

    first = check()
    assert (first[0] - first[2]).abs().max() > 100 * TOLERANCE
    llm.sleep(level=2)
    llm.wake_up()
    llm.reset_prefix_cache()
    check()
    llm.shutdown()


def test_an_adapter_of_a_module_that_transformers_lacks_names_it(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.experts.0.w1"
    adapter = write_adapter(tmp_path / "a", {module: (torch.ones(4, 64), torch.ones(96, 4))})
    with pytest.raises(StartupError, match=f"the module '{module}', but adapters of this model can change only k_proj"):
        LLM(str(make_tiny("minimax_m2", tmp_path)), enable_lora=True, lora_modules=f"a={adapter}")
