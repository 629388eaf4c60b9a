"""Whole engines that compute in FP8, in the interpreter: tokens equal those of transformers over the same roundings."""

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.devices.cuda_device import CudaDevice
from octavo_engine.devices.device import CpuDevice
from octavo_engine.ops.group_tensor import GroupFormat
from octavo_testing.quantised_tiny import make_quantised
from octavo_testing.tiny_models import TINY, VOCAB, Tiny
from octavo_testing.triton_device import exact_e4m3, triton_kernels
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.slow

LAYERS, TOKENS = 2, 10
PROMPTS = [torch.randint(3, VOCAB, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (9, 3)]
PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
#: Method of the weights -> inputs that share a scale, None: all; the scale of all rows, None: each has its own.
ROUNDINGS: dict[str, tuple[int | None, float | None]] = {
    "fp8_block": (128, None),
    "fp8_tensor": (None, 0.1),
    "ct_fp8_channel": (None, None),
}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let engines keep what a GPU with FP8 arithmetic does, also in fp32, in which tokens are transformers'."""
    monkeypatch.setattr(CpuDevice, "keeps", lambda self, kept, dtype: isinstance(kept, GroupFormat))
    with exact_e4m3(), triton_kernels():
        yield


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that writes a model with several groups of 128 in a row, and one with its unpacked weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": LAYERS}
    monkeypatch.setitem(TINY, "llama_wide", Tiny(model_type="llama", config=sizes))

    def write(method: str) -> tuple[Path, Path]:
        folders = make_quantised("llama_wide", method, tmp_path, block=(128, 128))
        if method.startswith("ct"):
            path = folders[0] / "config.json"
            config = json.loads(path.read_text())
            config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = PER_TOKEN
            path.write_text(json.dumps(config))
        return folders

    return write


def tokens_of(folder: Path, **settings: Any) -> list[list[int]]:
    known = {"dtype": "float32", "max_num_batched_tokens": 20, "max_num_seqs": 4, "num_gpu_blocks_override": 16}
    llm = LLM(str(folder), max_model_len=64, **known | settings)
    try:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.shutdown()


def rounding_reference(folder: Path, group: int | None, scale: float | None) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    def forward(linear: torch.nn.Linear, x: Tensor) -> Tensor:
        groups = x.view(*x.shape[:-1], -1, group or x.shape[-1])
        scales = groups.abs().amax(-1, keepdim=True) / 448 if scale is None else torch.tensor(scale)
        codes = (groups * (1 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return F.linear((codes.float() * scales).view(x.shape), linear.weight)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.forward = partial(forward, module)
    return model


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    length = len(prompt) + TOKENS
    tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_length=length, eos_token_id=[], pad_token_id=0)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("method", ROUNDINGS)
def test_tokens_equal_transformers_over_the_same_roundings(
    method: str, checkpoint: Callable[[str], tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    quantised, unpacked = checkpoint(method)
    with caplog.at_level(logging.INFO):
        found = tokens_of(quantised)
    reference = rounding_reference(unpacked, *ROUNDINGS[method])
    assert found == [generated(reference, ids) for ids in PROMPTS]
    assert f"{4 * LAYERS} linear layers round them to FP8 (e4m3), 0 use 16 bits" in caplog.text


def test_a_gpu_without_fp8_multiplies_inputs_of_16_bits(
    checkpoint: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CpuDevice, "keeps", CudaDevice.keeps)
    quantised, unpacked = checkpoint("fp8_block")
    with caplog.at_level(logging.INFO):
        found = tokens_of(quantised, dtype="float16")
    reference = AutoModelForCausalLM.from_pretrained(unpacked, attn_implementation="eager").eval()
    assert found == [generated(reference, ids) for ids in PROMPTS]
    assert "made for activations of 8 bits; here they have 16 bits" in caplog.text
