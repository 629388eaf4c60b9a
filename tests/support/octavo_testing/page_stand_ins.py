"""Stand-ins for what the documents name and a test cannot fetch: models of the hub and LoRA adapters.

They have the names, architectures and files of the real ones, and small random weights. So each flag that a page
prints is read, checked and used by the engine, and only the answers differ.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from octavo_testing.tiny_models import SPECIAL, VOCAB, byte_tokenizer
from octavo_testing.tiny_vision import make_tiny_vision

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}<|assistant|>"
)


def write_hub_cache(hf_home: Path) -> None:
    """Write every model of the hub that a page runs into the hub's cache, where the engine finds it offline."""
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "org/name"):
        _write(hf_home, name, _qwen3)
    _write(hf_home, "Qwen/Qwen3-Embedding-0.6B", _embedder)
    _write(hf_home, "HuggingFaceTB/SmolVLM-256M-Instruct", _smolvlm)


def _write(hf_home: Path, name: str, make: Callable[[Path], None]) -> None:
    repo = hf_home / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    for revision in ("main", "v1"):
        (repo / "refs" / revision).write_text(COMMIT)
    make(repo / "snapshots" / COMMIT)


def _qwen3(folder: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=40960,
        eos_token_id=SPECIAL.index("</s>"),
        dtype="bfloat16",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "</s>"}))


def _embedder(folder: Path) -> None:
    _qwen3(folder)
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    (folder / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in modules])
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))


def _smolvlm(folder: Path) -> None:
    make_tiny_vision("smolvlm", folder.parent).rename(folder)


def write_adapter(folder: Path, *, hidden_size: int = 576, rank: int = 8) -> None:
    """Write an adapter of SmolLM2-135M's first query projection."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    shapes = {f"{name}_A.weight": (rank, hidden_size), f"{name}_B.weight": (hidden_size, rank)}
    save_file({key: torch.full(shape, 0.01) for key, shape in shapes.items()}, folder / "adapter_model.safetensors")
