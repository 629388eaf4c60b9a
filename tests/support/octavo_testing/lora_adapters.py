"""LoRA adapters with random weights, written by peft, and the logits that transformers and peft compute with them."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from octavo_testing.tiny_models import tiny_model

#: Modules of each architecture that adapters may change.
TARGETS: dict[str, tuple[str, ...]] = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
}


def make_adapter(model: str, folder: Path, targets: list[str], *, rank: int, seed: int, **settings: Any) -> Path:
    """Write an adapter of a tiny model with effects as large as the weights'; return its folder."""
    adapted = with_adapter(tiny_model(model), r=rank, target_modules=targets, **{"lora_alpha": 8, **settings})
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            scale = parameter.shape[1] ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    adapted.save_pretrained(str(folder))
    return folder


def with_adapter(model: PreTrainedModel, **settings: Any) -> PeftModel:
    """Return the model with a new adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about fan_in_fan_out of GPT-2, and a deprecated attribute
        adapted = get_peft_model(model, LoraConfig(**settings))
    assert isinstance(adapted, PeftModel)
    return adapted


class PeftOracle:
    """transformers' model with peft's adapters."""

    def __init__(self, model: str) -> None:
        self._name = model
        self._models: dict[Path | None, PreTrainedModel | PeftModel] = {None: tiny_model(model)}

    def logprobs(self, adapter: Path | None, tokens: list[int]) -> Tensor:
        """Return the log-probabilities [len(tokens), vocabulary] after each token."""
        if adapter not in self._models:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._models[adapter] = PeftModel.from_pretrained(tiny_model(self._name), str(adapter)).eval()
        with torch.no_grad():
            logits: Tensor = self._models[adapter](torch.tensor([tokens])).logits
        return logits[0].log_softmax(-1)
