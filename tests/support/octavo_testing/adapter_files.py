"""LoRA adapters in peft's format, written without peft, and the checkpoint into which one is merged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."
#: Modules of the tiny Llama, with inputs and outputs.
LLAMA_MODULES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 96),
    "mlp.up_proj": (64, 96),
    "mlp.down_proj": (96, 64),
}


def llama_pairs(*modules: str, rank: int = 8, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """Return random matrices A and B for modules of the first two layers of the tiny Llama (all by default)."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for layer in range(2):
        for module in modules or LLAMA_MODULES:
            size, out = LLAMA_MODULES[module]
            a = torch.randn(rank, size, generator=generator) * size**-0.5
            b = torch.randn(out, rank, generator=generator) * rank**-0.5
            pairs[f"model.layers.{layer}.{module}"] = a, b
    return pairs


def write_adapter(
    folder: Path,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    *,
    tensors: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter. `tensors`: further ones, by their names after peft's prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"{name}.lora_A.weight": a for name, (a, _) in pairs.items()}
    named |= {f"{name}.lora_B.weight": b for name, (_, b) in pairs.items()}
    rank = next(iter(pairs.values()))[0].shape[0] if pairs else 8
    defaults = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**defaults, **settings}))
    every = {**named, **(tensors or {})}
    save_file(
        {PREFIX + name: each.clone().contiguous() for name, each in every.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def write_merged(model: Path, folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], *, scale: float = 1.0) -> Path:
    """Write a copy of a model whose weights include an adapter."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    for name, (a, b) in pairs.items():
        weights[f"{name}.weight"] += scale * b @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
