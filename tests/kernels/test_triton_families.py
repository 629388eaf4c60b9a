"""Families of transformers with partial rotation, whose rows have strides of their own, with the Triton kernels in the
interpreter: tokens equal those of transformers alone."""

from pathlib import Path

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_testing.tiny_models import make_tiny
from octavo_testing.triton_device import triton_kernels
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

PROMPTS = [list(range(5, 5 + length)) for length in (21, 3)]  # the first takes two steps
NEW_TOKENS = 3


@pytest.mark.parametrize("family", ["gpt_neox", "phi", "glm4"])
def test_a_family_with_partial_rotation_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with triton_kernels():
        llm = LLM(str(folder), dtype="float32", max_num_batched_tokens=20, max_num_seqs=4, num_gpu_blocks_override=16)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        llm.shutdown()
    for ids, output in zip(PROMPTS, outputs, strict=True):
        want = reference.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=[], pad_token_id=0
        )
        assert output.outputs[0].token_ids == want[0, len(ids) :].tolist()
