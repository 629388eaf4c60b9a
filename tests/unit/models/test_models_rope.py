"""RoPE frequencies, factors and tables against transformers', for each kind."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.rope import RotaryEmbedding, inverse_frequencies, rope_spec
from octavo_engine.ops.rope import Rotation, rotate_
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import rope_parameters
from octavo_engine.wire.errors import StartupError
from transformers import LlamaConfig, Qwen2_5_VLTextConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

HEADS, HEAD_DIM, MAX_POSITIONS = 4, 16, 96
LONG = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.5 + i for i in range(8)]}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_factor_given": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
    "yarn_mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn_not_truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 48, **LONG},
    "longrope_factor_given": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 48,
        "attention_factor": 1.7,
        **LONG,
    },
}


def hf_config(rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": HEADS * HEAD_DIM,
        "num_attention_heads": HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_theta": 5000.0, **rope},
    }


def model_config(hf: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=HEADS * HEAD_DIM,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        dtype="float32",
        hf=hf,
    )


def spec_of(hf: dict[str, Any]):
    return rope_spec(model_config(hf), rope_parameters(hf))


@pytest.mark.parametrize("length", [40, 96, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_transformers(kind: str, length: int) -> None:
    hf = hf_config(KINDS[kind])
    theirs = LlamaConfig(**hf)
    if KINDS[kind]["rope_type"] == "default":
        share = KINDS[kind].get("partial_rotary_factor", 1.0)
        dim = int(HEAD_DIM * share)
        expected, factor = 1.0 / (5000.0 ** (torch.arange(0, dim, 2).float() / dim)), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](theirs, "cpu", seq_len=length)
    ours, our_factor = inverse_frequencies(spec_of(hf), length)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "partial"])
def test_rotation_equals_transformers(kind: str) -> None:
    """The lengths are full, so that transformers also uses its final scaling."""
    length = 128
    hf = hf_config(KINDS[kind])
    q, k = torch.randn(2, 1, HEADS, length, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**hf))(q, positions[None])
    expected = torch.cat(apply_rotary_pos_emb(q, k, cos, sin), 1)[0].transpose(0, 1)
    build = BuildContext(dtype=torch.float32, device=torch.device("cpu"), max_model_len=length)
    rotation = RotaryEmbedding(spec_of(hf), build)(positions)
    ours = torch.cat((q, k), 1)[0].transpose(0, 1).contiguous()
    rotate_(ours, rotation.cos, rotation.sin)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)


MROPES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen2_vl": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, {"mrope_section": [2, 1, 5]}),
    "qwen2_5_vl": (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding, {"type": "mrope", "mrope_section": [1, 4, 3]}),
    "qwen3_vl": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, {"mrope_section": [4, 2, 2]}),
    "qwen3_vl_whole": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, {"mrope_section": [2, 3, 3]}),
    "qwen3_vl_yarn": (
        Qwen3VLTextConfig,
        Qwen3VLTextRotaryEmbedding,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mrope_section": [4, 2, 2]},
    ),
}


@pytest.mark.parametrize("name", MROPES)
def test_rotation_by_three_coordinates_equals_transformers(name: str) -> None:
    config_class, rope_class, rope = MROPES[name]
    hf = {**hf_config({}), "head_dim": HEAD_DIM, "rope_scaling": {"rope_theta": 5000.0, **rope}}
    del hf["rope_parameters"]
    positions = torch.randint(0, MAX_POSITIONS, (3, 40), generator=torch.Generator().manual_seed(1))
    q = torch.randn(1, HEADS, 40, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_class(config_class(**deepcopy(hf)))(q, positions[:, None])
    expected = apply_rotary_pos_emb(q, q, cos, sin)[0][0].transpose(0, 1)
    build = BuildContext(dtype=torch.float32, device=torch.device("cpu"), max_model_len=MAX_POSITIONS)
    layer = RotaryEmbedding(spec_of({**hf, "model_type": config_class.model_type}), build)
    ours = q[0].transpose(0, 1).contiguous()
    rotate_(ours, *vars_of(layer(positions)))
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)
    same = positions[:1].expand(3, -1)
    for found, wanted in zip(vars_of(layer(same)), vars_of(layer(positions[0])), strict=True):
        assert found.equal(wanted)


def vars_of(rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    return rotation.cos, rotation.sin


@pytest.mark.parametrize(
    ("sections", "says"), [([2, 2, 2], "has 6 frequencies, but the heads have 8"), ([8], "three"), ("8", "three")]
)
def test_sections_that_do_not_fit_are_refused(sections: Any, says: str) -> None:
    hf = hf_config({"mrope_section": sections}) | {"model_type": "qwen2_vl_text"}
    build = BuildContext(dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    with pytest.raises(StartupError, match=says):
        RotaryEmbedding(spec_of(hf), build)


def test_rotation_leaves_other_dimensions_unchanged() -> None:
    build = BuildContext(dtype=torch.float32, device=torch.device("cpu"), max_model_len=32)
    rotation = RotaryEmbedding(spec_of(hf_config(KINDS["partial"])), build)(torch.tensor([31, 4, 0]))
    before = torch.randn(3, 2, HEAD_DIM)
    after = before.clone()
    rotate_(after, rotation.cos, rotation.sin)
    assert after[..., HEAD_DIM // 2 :].equal(before[..., HEAD_DIM // 2 :])
    assert after[2].equal(before[2])
    assert not after[:2, :, : HEAD_DIM // 2].equal(before[:2, :, : HEAD_DIM // 2])
    torch.testing.assert_close(after.norm(dim=-1), before.norm(dim=-1))


def test_rotation_works_on_a_part_of_a_larger_tensor() -> None:
    """Queries and keys are rotated in place within the fused qkv output."""
    build = BuildContext(dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    rotation = RotaryEmbedding(spec_of(hf_config(KINDS["default"])), build)(torch.arange(8))
    heads = torch.randn(8, 6, HEAD_DIM)
    values, expected = heads[:, 4:].clone(), heads[:, :4].clone()
    rotate_(heads[:, :4], rotation.cos, rotation.sin)
    rotate_(expected, rotation.cos, rotation.sin)
    assert heads[:, 4:].equal(values)
    torch.testing.assert_close(heads[:, :4], expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
        (
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        ),
        (
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, **LLAMA3},
        ),
        (
            {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        ),
    ],
)
def test_both_spellings_of_config_agree(old: dict[str, Any], new: dict[str, Any]) -> None:
    ours_old, ours_new = (inverse_frequencies(spec_of(hf), 128) for hf in (old, {"rope_parameters": new}))
    assert ours_old[0].equal(ours_new[0])
    assert ours_old[1] == ours_new[1]


def test_frequencies_depend_only_on_max_model_len() -> None:
    """They do not depend on a sequence's length, so that cached keys stay valid."""
    dynamic, longrope = (spec_of(hf_config(KINDS[kind])) for kind in ("dynamic", "longrope"))
    assert not inverse_frequencies(dynamic, 96)[0].equal(inverse_frequencies(dynamic, 97)[0])
    assert inverse_frequencies(dynamic, 10)[0].equal(inverse_frequencies(dynamic, 96)[0])
    assert inverse_frequencies(longrope, 10)[0].equal(inverse_frequencies(longrope, 48)[0])
    assert not inverse_frequencies(longrope, 48)[0].equal(inverse_frequencies(longrope, 49)[0])


def test_an_unknown_rope_type_is_named() -> None:
    with pytest.raises(StartupError, match="rope type 'spiral' is not supported"):
        inverse_frequencies(spec_of(hf_config({"rope_type": "spiral"})), 16)
