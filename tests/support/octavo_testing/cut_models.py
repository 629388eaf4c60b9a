"""Writes the first layers of a model as a model of their own: a draft model with the same vocabulary."""

import json
import re
from pathlib import Path

import torch
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.weights.loader import iter_weights
from safetensors.torch import save_file

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_first_layers(model: str, num_layers: int, folder: Path) -> Path:
    """Write the embedding, the first layers and the head to `folder`, in bfloat16; return the folder."""
    files = resolve_model(model)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in iter_weights(files, dtype=torch.bfloat16)
        if (layer := _LAYER.match(name)) is None or int(layer[1]) < num_layers
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(files.config | {"num_hidden_layers": num_layers}))
    (folder / "tokenizer.json").write_text(load_tokenizer(files).to_json())
    return folder
