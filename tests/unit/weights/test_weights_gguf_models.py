"""A transformers model converted to GGUF as llama.cpp does is read with the same config and weights."""

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from octavo_engine.sources.model_config import load_model_config, rope_parameters
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import iter_weights
from octavo_engine.wire.errors import StartupError
from octavo_testing.gguf_checkpoints import TINY_CONFIGS, tiny_model, write_tiny_gguf
from safetensors.torch import load_file

ARCHITECTURES = sorted(TINY_CONFIGS)


@pytest.fixture(params=ARCHITECTURES, scope="module")
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    model = tiny_model(request.param)
    folder = tmp_path_factory.mktemp("gguf")
    write_tiny_gguf(folder / "m.gguf", request.param, model)
    model.save_pretrained(folder / "source")
    return model, resolve_model(str(folder / "m.gguf"))


def test_weights_equal_their_source_exactly(converted) -> None:
    _, files = converted
    expected = load_file(files.root / "source" / "model.safetensors")
    loaded = dict(iter_weights(files))
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6 if "norm" in name else 0, msg=name)


def test_the_config_equals_transformers(converted) -> None:
    model, files = converted
    config, theirs = load_model_config(files), model.config
    assert config.architecture == type(model).__name__
    assert (config.vocab_size, config.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (config.num_layers, config.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert config.num_kv_heads == getattr(theirs, "num_key_value_heads", theirs.num_attention_heads)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert config.eos_token_ids == (1, 2)
    assert config.bos_token_id == 0
    assert config.dtype == "float32"


KEYS = [
    "intermediate_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "sliding_window",
    "layer_types",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_bias",
    "hidden_act",
    "hidden_activation",
    "n_positions",
    "n_embd",
    "layer_norm_epsilon",
    "activation_function",
    "original_max_position_embeddings",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
]


def test_other_keys_agree_with_transformers(converted) -> None:
    model, files = converted
    compared = [key for key in KEYS if key in files.config and hasattr(model.config, key)]
    assert len(compared) >= 4
    for key in compared:
        assert files.config[key] == getattr(model.config, key), key


def test_rope_agrees_with_transformers(converted) -> None:
    model, files = converted
    if model.config.model_type in ("gpt2", "llama"):
        return
    ours, theirs = rope_parameters(files.config), model.config.rope_parameters
    if model.config.model_type == "gemma3_text":
        assert ours["rope_theta"] == theirs["full_attention"]["rope_theta"]
        assert files.config["rope_local_base_freq"] == theirs["sliding_attention"]["rope_theta"]
    else:
        assert (ours["rope_theta"], ours["rope_type"]) == (theirs["rope_theta"], theirs["rope_type"])


def test_llama3_rope_becomes_longrope_with_the_same_frequencies(tmp_path: Path) -> None:
    """The frequencies are compared with those of transformers' two functions."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = tiny_model("llama")
    write_tiny_gguf(tmp_path / "m.gguf", "llama", model)
    files = resolve_model(str(tmp_path / "m.gguf"))
    rope = rope_parameters(files.config)
    assert rope["rope_type"] == "longrope"
    assert len({round(factor, 3) for factor in rope["long_factor"]}) >= 3  # 1, a blend, 8
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=256)
    ours, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu")
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    assert attention_factor == 1.0
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("qtype", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_model_is_close_to_its_source(tmp_path: Path, qtype: str) -> None:
    """Interleaving and quantising commute only if rows are restored to their positions."""
    model = tiny_model("llama")
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", model, qtype=qtype)
    error = {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02, "Q4_0": 0.2, "Q4_1": 0.15, "Q5_0": 0.1, "Q5_1": 0.08}[qtype]
    expected = model.state_dict()
    for name, tensor in iter_weights(resolve_model(str(path))):
        assert (tensor.float() - expected[name]).abs().max() < error, name


def test_shards_make_one_model(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    write_tiny_gguf(tmp_path / "m.gguf", "qwen2", model, max_tensors=10)
    files = resolve_model(str(tmp_path))
    assert [path.name for path in files.weight_files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    expected = {name for name in model.state_dict() if name != "lm_head.weight"}
    assert {name for name, _ in iter_weights(files)} == expected


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "qwen2", tiny_model("qwen2"), extra={"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(StartupError, match=r"m\.gguf: tensor 'blk\.0\.attn_sinks\.weight' is unknown to .* 'qwen2'"):
        list(iter_weights(resolve_model(str(path))))


@pytest.mark.parametrize("shape", [(9, 4), ()])
def test_rows_that_heads_cannot_share_are_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path, num_rows = tmp_path / "m.gguf", shape[0] if shape else 1
    write_tiny_gguf(path, "llama", tiny_model("llama"), extra={"blk.2.attn_q.weight": torch.ones(shape)})
    message = rf"m\.gguf: tensor 'blk\.2\.attn_q\.weight': {num_rows} rows don't split into 4"
    with pytest.raises(StartupError, match=message):
        list(iter_weights(resolve_model(str(path))))


def test_a_stack_of_another_number_of_experts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "olmoe", tiny_model("olmoe"), extra={"blk.2.ffn_up_exps.weight": torch.ones(5, 8, 4)})
    message = r"m\.gguf: tensor 'blk\.2\.ffn_up_exps\.weight' has shape \(5, 8, 4\), .* declares 6 experts"
    with pytest.raises(StartupError, match=message):
        list(iter_weights(resolve_model(str(path))))


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_0"])
def test_quantised_experts_are_cut_between_their_blocks(tmp_path: Path, qtype: str) -> None:
    """An expert has the values that its rows have when the library expands the whole stack."""
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "qwen2moe", tiny_model("qwen2moe"), qtype=qtype)
    stacks = {t.name: t for t in GGUFReader(path).tensors if t.name.endswith("_exps.weight")}
    assert {stack.tensor_type.name for stack in stacks.values()} == {qtype}
    loaded = dict(iter_weights(resolve_model(str(path))))
    for kind in ("gate", "up", "down"):
        stack = stacks[f"blk.1.ffn_{kind}_exps.weight"]
        for expert, values in enumerate(dequantize(stack.data, stack.tensor_type)):
            ours = loaded[f"model.layers.1.mlp.experts.{expert}.{kind}_proj.weight"]
            assert torch.equal(ours, torch.from_numpy(values))


def test_longrope_factors_of_phi3_reach_the_config(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    long, short = torch.linspace(1, 32, 8), torch.linspace(1, 2, 8)
    extra = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    model = tiny_model("phi3")
    model.config.original_max_position_embeddings = 64
    write_tiny_gguf(path, "phi3", model, extra=extra)
    files = resolve_model(str(path))
    rope = rope_parameters(files.config)
    assert (rope["long_factor"], rope["short_factor"]) == (long.tolist(), short.tolist())
    assert (rope["rope_type"], rope["original_max_position_embeddings"], rope["factor"]) == ("longrope", 64, 4.0)
    assert "attention_factor" not in rope
    assert extra.keys().isdisjoint(name for name, _ in iter_weights(files))


def test_quantised_weights_are_read_in_the_final_dtype(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"), qtype="Q8_0")
    files = resolve_model(str(path))
    exact = dict(iter_weights(files))
    for name, tensor in iter_weights(files, dtype=torch.bfloat16):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name
