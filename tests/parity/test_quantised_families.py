"""Whole models of each quantisation method: their greedy tokens equal transformers' over the unpacked weights."""

import re
from pathlib import Path

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.wire.errors import StartupError
from octavo_testing.parallel_llm import started, started_stages
from octavo_testing.quantised_tiny import METHODS, make_quantised
from octavo_testing.tiny_models import LENGTH, VOCAB
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"]
PROMPTS = [torch.randint(3, VOCAB, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (9, 31)]


def tokens_of(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=LENGTH - len(ids), ignore_eos=True) for ids in PROMPTS]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_length=LENGTH, eos_token_id=[], pad_token_id=0)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_over_the_unpacked_weights(family: str, method: str, tmp_path: Path) -> None:
    quantised, unpacked = make_quantised(family, method, tmp_path)
    with started(str(quantised), 1, max_model_len=LENGTH) as llm:
        found = tokens_of(llm)
    reference = AutoModelForCausalLM.from_pretrained(unpacked, attn_implementation="eager").eval()
    assert found == [generated(reference, ids) for ids in PROMPTS]
    assert len({token for ids in found for token in ids}) > 10


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("method", ["fp8_block", "nf4", "int8"])
def test_weights_have_equal_bits_after_a_sleep(family: str, method: str, tmp_path: Path) -> None:
    quantised, _ = make_quantised(family, method, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)

    def outputs(llm: LLM) -> list[object]:
        llm.reset_prefix_cache()
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in found]

    with started(str(quantised), 1, max_model_len=LENGTH, enable_sleep_mode=True) as llm:
        before = outputs(llm)
        llm.sleep(level=2)
        llm.wake_up()
        assert outputs(llm) == before


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "fp8_block"), ("llama", "nf4"), ("qwen3_moe", "fp8_block"), ("qwen3_moe", "awq")]
)
def test_two_ranks_cut_blocks_anywhere(family: str, method: str, tmp_path: Path) -> None:
    """Each rank expands the whole weight before it takes its part: blocks of 24 x 40 cross the borders of parts."""
    quantised, unpacked = make_quantised(family, method, tmp_path)
    with started(str(quantised), 2, max_model_len=LENGTH) as llm:
        found = tokens_of(llm)
    with started(str(unpacked), 1, max_model_len=LENGTH) as llm:
        assert tokens_of(llm) == found


@pytest.mark.parametrize("method", ["fp8_block", "nf4"])
def test_two_stages_read_their_own_layers(method: str, tmp_path: Path) -> None:
    quantised, unpacked = make_quantised("llama", method, tmp_path)
    with started_stages(str(quantised), 2, max_model_len=LENGTH) as llm:
        found = tokens_of(llm)
    with started(str(unpacked), 1, max_model_len=LENGTH) as llm:
        assert tokens_of(llm) == found


@pytest.mark.parametrize(
    ("method", "part", "message"),
    [
        ("fp8_block", "weight", "output 0 has a weight that is not a number"),
        ("fp8_block", "weight_scale_inv", "a scale is 0.0, but it must be a positive number"),
        ("nf4", "weight.absmax", "it has 1 values, but"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", "check that all weight files are there"),
    ],
)
def test_a_corrupt_layer_that_transformers_gets_is_named_in_one_line(
    method: str, part: str, message: str, tmp_path: Path
) -> None:
    quantised, _ = make_quantised("glm4_moe", method, tmp_path)
    name = f"model.layers.0.self_attn.o_proj.{part}"
    tensors = load_file(quantised / "model.safetensors")
    if "quant_state" in part:
        del tensors[name]
    elif part == "weight":
        tensors[name] = torch.full(tensors[name].shape, float("nan")).to(torch.float8_e4m3fn)
    else:
        tensors[name] = torch.zeros(1) if method == "nf4" else tensors[name] * 0
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(StartupError, match=f"tensor '{re.escape(name)}.*{message}") as failure:
        LLM(str(quantised), dtype="float32", max_model_len=LENGTH, num_gpu_blocks_override=32)
    assert "\n" not in str(failure.value)
