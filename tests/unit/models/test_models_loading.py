"""A model's errors for wrong weights and configs, and the loading of right weights."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.moe import MoE
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.attention import LayerKVSpec
from octavo_engine.settings.records import ModelConfig
from octavo_engine.weights.dummy import dummy_weights
from octavo_engine.wire.errors import StartupError
from octavo_testing.paged import PagedDriver
from torch import Tensor

LLAMA: dict[str, Any] = {"intermediate_size": 48, "rope_theta": 10000.0, "tie_word_embeddings": False}


MOE: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}


def config_of(architecture: str = "LlamaForCausalLM", **hf: Any) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=50,
        hidden_size=32,
        num_layers=6,
        num_heads=4,
        num_kv_heads=4 if architecture in ("GPT2LMHeadModel", "OPTForCausalLM") else 2,
        head_dim=8,
        max_position_embeddings=64,
        dtype="float32",
        hf={**LLAMA, **hf},
    )


def build(config: ModelConfig, *, dtype: torch.dtype = torch.float32, max_model_len: int = 32) -> Model:
    return build_model(config, dtype=dtype, device="cpu", max_model_len=max_model_len)


def weights_of(model: Model) -> dict[str, Tensor]:
    return dict(dummy_weights(model.named_shapes().items(), seed=3))


def ready(config: ModelConfig, weights: dict[str, Tensor] | None = None) -> Model:
    model = build(config)
    model.load_weights((weights or weights_of(model)).items())
    model.finish_loading()
    return model


def logits(model: Model, tokens: list[int]) -> Tensor:
    return PagedDriver(model).feed({0: tokens})[0]


def test_an_unknown_architecture_error_says_where_supported_ones_are_listed() -> None:
    with pytest.raises(StartupError) as error:
        build(config_of("XyzForCausalLM"))
    assert "'XyzForCausalLM' is not supported" in str(error.value)
    assert "docs/guide/models.md" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_tensor_is_named_with_its_shape() -> None:
    model = build(config_of())
    weights = weights_of(model)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(StartupError, match=r"missing tensor 'model.layers.1.mlp.up_proj.weight' of shape \(48, 32\):"):
        model.load_weights(weights.items())


def test_several_missing_tensors_are_counted() -> None:
    with pytest.raises(StartupError, match=r"missing tensor '.*' of shape .*, and 56 more tensors:"):
        build(config_of()).load_weights([])


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("MixtralForCausalLM", "model.layers.3.block_sparse_moe.experts.2.w3.weight"),
        ("Qwen3MoeForCausalLM", "model.layers.3.mlp.experts.2.up_proj.weight"),
    ],
)
def test_a_missing_tensor_of_one_expert_is_named_with_the_model(architecture: str, name: str) -> None:
    model = build(replace(config_of(architecture, **MOE), name="/models/mine"))
    weights = weights_of(model)
    del weights[name]
    with pytest.raises(StartupError, match=rf"/models/mine: missing tensor '{name}' of shape \(\d+, 32\):"):
        model.load_weights(weights.items())


def test_a_stack_of_other_experts_is_named_with_both_shapes() -> None:
    model = build(replace(config_of("Qwen3MoeForCausalLM", **MOE), name="/models/mine"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    message = rf"/models/mine: tensor '{name}' has shape \(3, 40, 32\), the model needs \(4, 40, 32\)"
    with pytest.raises(StartupError, match=message):
        model.load_weights([(name, torch.zeros(3, 40, 32))])


@pytest.mark.parametrize(
    ("architecture", "hf", "message"),
    [
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, .* has 4 experts: use at most 4"),
        ("Qwen2MoeForCausalLM", {"num_experts_per_tok": 0}, "num_experts_per_tok .* positive number, got 0"),
        ("Qwen3MoeForCausalLM", {"num_local_experts": "x"}, "num_local_experts .* positive number, got 'x'"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": -1}, "moe_intermediate_size .* positive number, got -1"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step .* positive number, got 0"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv in config.json is 8.0: .* only null"),
    ],
)
def test_impossible_experts_are_refused(architecture: str, hf: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=f"/models/mine: {message}"):
        build(replace(config_of(architecture, **{**MOE, **hf}), name="/models/mine"))


def test_some_layers_are_dense() -> None:
    model = build(config_of("Qwen2MoeForCausalLM", **MOE, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [isinstance(layer.mlp, MoE) for layer in model.layers] == [False, True, False, False, False, True]


def test_an_unexpected_tensor_is_named() -> None:
    model = build(config_of())
    weights = weights_of(model) | {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(1)}
    with pytest.raises(StartupError, match=r"unexpected tensor 'model.layers.0.self_attn.q_proj.qweight': LlamaFor"):
        model.load_weights(weights.items())


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    model = build(config_of())
    weights = weights_of(model) | {"model.norm.weight": torch.zeros(33)}
    with pytest.raises(StartupError, match=r"'model.norm.weight' has shape \(33,\), the model needs \(32,\)"):
        model.load_weights(weights.items())


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LlamaForCausalLM", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("GPT2LMHeadModel", "transformer.h.0.attn.bias"),
        ("GPT2LMHeadModel", "h.3.attn.masked_bias"),
        ("GPT2LMHeadModel", "lm_head.weight"),
        ("OPTForCausalLM", "lm_head.weight"),
    ],
)
def test_leftovers_of_old_checkpoints_are_ignored(architecture: str, name: str) -> None:
    hf = {"tie_word_embeddings": True}
    model = build(config_of(architecture, **hf))
    model.load_weights((weights_of(model) | {name: torch.zeros(2)}).items())


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [("GPT2LMHeadModel", "transformer."), ("OPTForCausalLM", "model."), ("LlamaForCausalLM", "model.")],
)
def test_a_checkpoint_of_the_bare_model_is_loaded(architecture: str, prefix: str) -> None:
    config = config_of(architecture, tie_word_embeddings=True)
    weights = weights_of(build(config))
    bare = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    assert bare.keys() != weights.keys()
    assert logits(ready(config, bare), [1, 2, 3]).equal(logits(ready(config, weights), [1, 2, 3]))


def test_weights_are_loaded_one_at_a_time_in_any_order() -> None:
    config = config_of()
    weights = weights_of(build(config))
    backwards = dict(reversed(weights.items()))
    assert logits(ready(config, backwards), [1, 2, 3]).equal(logits(ready(config, weights), [1, 2, 3]))

    def stream() -> Iterator[tuple[str, Tensor]]:
        """Overwrite each tensor when the next is requested: the model must have copied it."""
        for name, tensor in weights.items():
            loan = tensor.clone()
            yield name, loan
            loan.fill_(torch.nan)

    model = build(config)
    model.load_weights(stream())
    model.finish_loading()
    assert logits(model, [1, 2, 3]).equal(logits(ready(config, weights), [1, 2, 3]))


def test_weights_are_converted_to_the_type_of_the_model() -> None:
    model = build(config_of(), dtype=torch.bfloat16)
    model.load_weights(weights_of(model).items())
    model.finish_loading()
    result = logits(model, [1, 2, 3])
    assert result.dtype == torch.float32
    exact = logits(ready(config_of()), [1, 2, 3])
    assert torch.nn.functional.cosine_similarity(result, exact).min() > 0.995


def test_bytes_are_counted_once() -> None:
    tied, untied = (build(config_of(tie_word_embeddings=tie)) for tie in (True, False))
    head = 50 * 32 * 4
    assert untied.weights_bytes() - tied.weights_bytes() == head
    for model in (tied, untied):
        model.load_weights(weights_of(model).items())
        model.finish_loading()
    assert tied.weights_bytes() == untied.weights_bytes()  # the tied head has a packed copy of its own


def test_no_weight_stays_unpacked() -> None:
    linears = [m for m in ready(config_of()).modules() if isinstance(m, Linear)]
    assert len(linears) == 6 * 4 + 1
    assert all(linear.method.weight is None for linear in linears)


def test_inputs_may_be_embeddings() -> None:
    for architecture in ("LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel"):
        model = ready(config_of(architecture))
        tokens = torch.tensor([5, 6, 7, 8])
        rows = model.embedding(tokens)
        kept = rows.clone()
        expected = logits(model, tokens.tolist())

        class Embedded(PagedDriver):
            def __init__(self, model: Model, rows: Tensor) -> None:
                super().__init__(model)
                self.rows = rows

            def model_inputs(self, tokens: Tensor) -> Tensor:
                return self.rows

        assert Embedded(model, rows).feed({0: tokens.tolist()})[0].equal(expected)
        assert rows.equal(kept), "a caller's embeddings must not become the residual stream"


def test_learned_positions_bound_max_model_len() -> None:
    for architecture in ("GPT2LMHeadModel", "OPTForCausalLM"):
        build(config_of(architecture), max_model_len=64)
        with pytest.raises(StartupError, match="max_model_len is 65, but the model learned only 64 positions"):
            build(config_of(architecture), max_model_len=65)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(StartupError, match="activation 'maxout' is not supported"):
        build(config_of(hidden_act="maxout"))


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("architecture", "hf", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, [None] * 6),
        ("MistralForCausalLM", {"sliding_window": 8}, [8] * 6),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 6),
        ("MistralForCausalLM", {}, [4096] * 6),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2}, [None] * 6),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 2}, [None] * 6),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 8, 8, 8, 8],
        ),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": [SLIDING] + [FULL] * 5},
            [8] + [None] * 5,
        ),
        ("MixtralForCausalLM", {}, [None] * 6),
        ("MixtralForCausalLM", {"sliding_window": 8}, [8] * 6),
        (
            "Qwen2MoeForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            [8, None, 8, None, None, None],
        ),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, [8] * 6),
        ("Qwen3MoeForCausalLM", {"sliding_window": 8}, [None] * 6),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, [8, None, 8, None, 8, None]),
        ("Gemma3ForCausalLM", {"sliding_window": 8}, [8, 8, 8, 8, 8, None]),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8, None, 8, None]),
        ("Phi3ForCausalLM", {"sliding_window": 8}, [8] * 6),
        ("Phi3ForCausalLM", {}, [None] * 6),
    ],
)
def test_windows_equal_transformers(architecture: str, hf: dict[str, Any], windows: list[int | None]) -> None:
    expected = [LayerKVSpec(num_kv_heads=2, head_dim=8, window=window) for window in windows]
    assert build(config_of(architecture, **hf)).kv_specs() == expected


def test_gemma3_ropes_are_read_in_both_spellings() -> None:
    old = {"rope_theta": 900.0, "rope_local_base_freq": 70.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    new = {
        "rope_parameters": {
            FULL: {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
            SLIDING: {"rope_type": "default", "rope_theta": 70.0},
        }
    }
    config = config_of("Gemma3ForCausalLM")
    bare = {key: value for key, value in config.hf.items() if key != "rope_theta"}
    ours_old, ours_new = (build(replace(config, hf={**bare, **hf})) for hf in (old, new))
    for rope_old, rope_new in zip(ours_old.ropes, ours_new.ropes, strict=True):
        assert rope_old.table.equal(rope_new.table)
    assert not ours_old.ropes[0].table.equal(ours_old.ropes[1].table)
    default, named = build(replace(config, hf=bare)), build(replace(config, hf={**bare, "rope_theta": 1e6}))
    assert default.ropes[0].table.equal(named.ropes[0].table)
