"""Models that transformers runs: refusals, wrong weights, the check of each call, planned bytes, failing code."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.recorded_steps import MOST_BYTES
from octavo_engine.models import registry, transformers_support
from octavo_engine.models.registry import ARCHITECTURES, build_model, complete_config
from octavo_engine.models.transformers_attention import UnsupportedAttention
from octavo_engine.models.transformers_blocks import BlockMLP, BlockNorm
from octavo_engine.models.transformers_decoder import TransformersDecoder
from octavo_engine.models.transformers_layers import RowExperts, RowLinear
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.runner.memory_plan import plan_memory, planned_weights_bytes
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ModelConfig
from octavo_engine.sources.model_config import OWN, context_length, load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_files, resolve_model
from octavo_engine.weights.dummy import dummy_weights
from octavo_engine.weights.loader import iter_weights
from octavo_engine.wire.errors import StartupError
from octavo_testing.decode_pairs import Pair
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.paged import PagedDriver
from octavo_testing.tiny_models import LENGTH, byte_tokenizer, make_tiny, tiny_config
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, DeepseekV3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.granite.modeling_granite import GraniteDecoderLayer, GraniteForCausalLM, GraniteMLP

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config_of(model_type: str, architecture: str, **more: Any) -> ModelConfig:
    config = AutoConfig.for_model(model_type, **{**SIZES, **more}).to_dict() | {"architectures": [architecture]}
    return load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=config))


def build(config: ModelConfig, dtype: torch.dtype = torch.float32, impl: Any = "transformers") -> TransformersDecoder:
    model = build_model(config, impl=impl, dtype=dtype, device="cpu", max_model_len=32)
    assert isinstance(model, TransformersDecoder)
    return model


def dummy(model: TransformersDecoder) -> dict[str, torch.Tensor]:
    return dict(dummy_weights(model.named_shapes().items(), dtype=model.build.dtype))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: make_tiny(name, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (("bloom", "BloomForCausalLM"), "_supports_attention_backend"),
        (("stablelm", "StableLmForCausalLM"), "_supports_attention_backend"),
        (("nemotron", "NemotronForCausalLM"), "does not pass keywords on"),
        (("minimax", "MiniMaxForCausalLM"), "layers of type linear_attention"),
        (("llama4_text", "Llama4ForCausalLM"), "layers of type chunked_attention"),
        (("gpt_oss", "GptOssForCausalLM"), "attention with s_aux"),
        (("mpt", "MptForCausalLM"), "_supports_attention_backend"),
        (("mamba", "MambaForCausalLM"), "_supports_attention_backend"),
        (("zaya", "ZayaForCausalLM"), "layers of type hybrid"),
        (("diffllama", "DiffLlamaForCausalLM"), "attends in layer 0 after 1 calls"),
        (("gemma3", "Gemma3ForConditionalGeneration"), "more than a decoder"),
    ],
)
def test_a_refusal_has_architecture_reason_and_remedy(config: tuple[str, str], reason: str) -> None:
    with pytest.raises(StartupError) as error:
        build(config_of(*config) if config[0] != "gemma3" else gemma3())
    message = str(error.value)
    assert f"'{config[1]}' is not supported" in message
    assert reason in message
    assert "use a model of another architecture" in message


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_a_start_refuses_an_architecture_before_it_reads_its_dimensions(impl: Any) -> None:
    for model_type, name in (("bloom", "BloomForCausalLM"), ("xlnet", "XLNetLMHeadModel")):
        hf = AutoConfig.for_model(model_type).to_dict() | {"architectures": [name]}
        config = load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=hf))
        with pytest.raises(StartupError, match=f"'{name}' is not supported"):
            complete_config(config, impl)


def test_dimensions_are_those_of_transformers_config_object() -> None:
    """DeepSeek-V3 names them otherwise, or leaves them to the class; keys that it has not are not read."""
    hf = tiny_config("deepseek_v3").to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    theirs = DeepseekV3Config(**hf)
    hf |= {"n_head": "x", "n_layer": -1, "num_local_experts": hf.pop("n_routed_experts")}
    config = load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=hf))
    found = complete_config(config, "auto")
    assert (found.num_layers, found.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (found.hidden_size, found.head_dim) == (theirs.hidden_size, theirs.head_dim)
    assert context_length(found) == theirs.max_position_embeddings


@pytest.mark.parametrize(("key", "value"), [("vocab_size", None), ("max_position_embeddings", None)])
def test_a_config_without_a_dimension_is_refused(key: str, value: Any) -> None:
    config = config_of("granite", "GraniteForCausalLM")
    hf = {name: given for name, given in config.hf.items() if name != "vocab_size"} | {key: value}
    with pytest.raises(StartupError, match=r"'GraniteForCausalLM' is not supported: "):
        complete_config(load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=hf)), "auto")


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (("granite", "GraniteForCausalLM"), {"num_hidden_layers": 10**9}),
        (("granite", "GraniteForCausalLM"), {"hidden_size": 10**12}),
        (("granite", "GraniteForCausalLM"), {"vocab_size": 10**40}),
        (("granite", "GraniteForCausalLM"), {"max_position_embeddings": -1}),
        (("granitemoe", "GraniteMoeForCausalLM"), {"num_local_experts": 10**15}),
    ],
)
def test_numbers_of_other_architectures_are_bounded(model: tuple[str, str], change: dict[str, Any]) -> None:
    hf = config_of(*model).hf | change
    with pytest.raises(StartupError) as error:
        build(load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=hf)))
    assert "\n" not in str(error.value)


def test_the_number_of_modules_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_support, "_MOST_MODULES", 20)
    with pytest.raises(StartupError, match=r"GraniteForCausalLM.* more than 20 modules"):
        build(config_of("granite", "GraniteForCausalLM"))
    monkeypatch.setattr(transformers_support, "_MOST_MODULES", 200)
    with pytest.raises(StartupError, match=r"GraniteMoeForCausalLM.* more than 200 modules"):
        build(config_of("granitemoe", "GraniteMoeForCausalLM", num_local_experts=99))


def test_a_tensor_that_no_checkpoint_has_needs_the_familys_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraniteForCausalLM, "_init_weights", lambda self, module: None)
    with pytest.raises(StartupError, match=r"'GraniteForCausalLM' is not supported: .* no values to .*inv_freq"):
        build(config_of("granite", "GraniteForCausalLM"))


def test_experts_of_another_form_stay_transformers_own() -> None:
    """Aria's are transposed, so that only transformers' code computes them."""
    model = build(config_of("aria_text", "AriaTextForCausalLM", moe_num_experts=4, moe_topk=2))
    load_dummy(model)
    assert not [module for module in model.modules() if isinstance(module, RowExperts)]
    assert "model.layers.1.mlp.experts.gate_up_proj" in model.named_shapes()


def test_tensors_of_layers_that_the_family_ignores_are_not_kept() -> None:
    """GLM-4.5 has a layer for drafts behind its own, with experts that a conversion would merge at the end."""
    hf = tiny_config("glm4_moe").to_dict() | {"architectures": ["Glm4MoeForCausalLM"]}
    model = build(load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=hf)))
    extra = {
        "model.layers.92.mlp.experts.0.gate_proj.weight": torch.zeros(2, 2),
        "model.layers.46.eh_proj": torch.zeros(2),
    }
    assert dict(model.names.convert(extra.items(), model._has_slot)) == extra
    model.load_weights((dummy(model) | extra).items())
    model.finish_loading()
    with pytest.raises(StartupError, match=r"unexpected tensor 'model.layers.45.eh_proj'"):
        model.load_weights({"model.layers.45.eh_proj": torch.zeros(2)}.items())


def test_the_start_ends_if_a_first_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x if x.is_meta else x[:, :, :7]

    monkeypatch.setattr(GraniteMLP, "forward", broken)
    with pytest.raises(StartupError, match=r"'GraniteForCausalLM' is not supported: its first step fails: The size"):
        load_dummy(build(config_of("granite", "GraniteForCausalLM")))


def test_an_operator_that_waits_for_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has no values, so that only the first step shows it."""

    def waiting(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x if x.is_meta or len(torch.where(x > 1)[0]) else 2 * x

    model = build(config_of("granite", "GraniteForCausalLM"))
    load_dummy(model)
    assert model.waiting_operator is None
    monkeypatch.setattr(GraniteMLP, "forward", waiting)
    load_dummy(model := build(config_of("granite", "GraniteForCausalLM")))
    assert model.waiting_operator == "aten.nonzero.default"


def test_a_block_whose_layers_are_read_stays_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = GraniteDecoderLayer.forward

    def reading(self: Any, *args: Any, **keywords: Any) -> Any:
        assert self.mlp.gate_proj is not None
        return forward(self, *args, **keywords)

    assert num_blocks(build(config_of("granite", "GraniteForCausalLM"))) == (9, 4)
    monkeypatch.setattr(GraniteDecoderLayer, "forward", reading)
    load_dummy(model := build(config_of("granite", "GraniteForCausalLM")))
    assert num_blocks(model) == (0, 0)


def num_blocks(model: TransformersDecoder) -> tuple[int, ...]:
    return tuple(sum(isinstance(each, kind) for each in model.modules()) for kind in (BlockNorm, BlockMLP))


def test_a_linear_layer_whose_weight_is_read_stays_transformers_own() -> None:
    """The router reads the type of its weight."""
    config = config_of("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", num_experts=4, moe_topk=2)
    model = build(config)
    load_dummy(model)
    kinds = {name.rpartition(".")[2]: type(module) for name, module in model.base.layers[0].named_modules()}
    assert kinds["wg"] is nn.Linear
    assert (kinds["q_proj"], kinds["shared_mlp"]) == (RowLinear, BlockMLP)


def test_a_tied_head_whose_weight_is_read_stays_with_its_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GraniteForCausalLM.forward

    def reads(self: Any, *args: Any, **keywords: Any) -> Any:
        assert self.lm_head.weight.dtype == torch.float32
        return own(self, *args, **keywords)

    monkeypatch.setattr(GraniteForCausalLM, "forward", reads)
    model = build(config_of("granite", "GraniteForCausalLM", tie_word_embeddings=True))
    assert "model.embed_tokens.weight" in dummy(model)
    load_dummy(model)
    assert model.causal_lm.lm_head.weight is model.base.embed_tokens.weight


def test_keywords_that_ask_for_further_outputs_change_nothing() -> None:
    model = build(config_of("granitemoeshared", "GraniteMoeSharedForCausalLM", num_local_experts=4))
    load_dummy(model)
    assert len(model.kv_specs()) == SIZES["num_hidden_layers"]


def load_dummy(model: TransformersDecoder) -> None:
    model.load_weights(dummy(model).items())
    model.finish_loading()


def test_architectures_of_octavo_are_known_without_torch() -> None:
    """`sources` reads the keys of these architectures only, and cannot import the registry."""
    names = {*ARCHITECTURES, *registry._WITHOUT_HEAD}
    assert all(OWN.fullmatch(name) for name in names)
    others = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if OWN.fullmatch(name)}
    assert others <= names


def gemma3() -> ModelConfig:
    """A multimodal architecture, whose text part would be run under its own name."""
    config = config_of("llama", "LlamaForCausalLM")
    hf = config.hf | {"architectures": ["Gemma3ForConditionalGeneration"]}
    return load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=hf))


def test_a_window_that_attention_does_not_get_is_refused_if_it_is_in_use() -> None:
    with pytest.raises(StartupError, match=r"does not pass the sliding_window of 19 on"):
        build(config_of("phimoe", "PhimoeForCausalLM", sliding_window=19, num_local_experts=2))
    assert build(config_of("phimoe", "PhimoeForCausalLM", sliding_window=32, num_local_experts=2)).kv_specs()


def test_code_in_a_checkpoint_is_never_run() -> None:
    hf = config_of("llama", "LlamaForCausalLM").hf
    other = hf | {"architectures": ["XyzForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_xyz.Xyz"}}
    config = load_model_config(ModelFiles(name="m", root=Path(), load_format="dummy", config=other))
    with pytest.raises(StartupError, match=r"'XyzForCausalLM' is not supported: .* code from checkpoints \(auto_map\)"):
        build(config, impl="auto")


def test_implementations_that_do_not_exist_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("granite", "GraniteForCausalLM")
    with pytest.raises(StartupError, match=r"'GraniteForCausalLM' is not one of Octavo's .*LlamaForCausalLM.*: omit"):
        build(config, impl="octavo")
    monkeypatch.setitem(sys.modules, "octavo_engine.models.transformers_decoder", None)
    with pytest.raises(StartupError, match=r"pip install 'octavo-engine\[transformers\]'"):
        build(config, impl="auto")


def test_gguf_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"))
    assert resolve_files(EngineConfig(model=str(path))).gguf == path
    with pytest.raises(StartupError, match=rf"{path}: --model-impl transformers reads no GGUF files: omit it"):
        resolve_files(EngineConfig(model=str(path), model_impl="transformers"))


def test_wrong_tensors_are_named() -> None:
    model = build(config_of("granite", "GraniteForCausalLM"))
    name = "model.layers.1.mlp.up_proj.weight"
    given = dummy(model)
    with pytest.raises(StartupError, match=rf"missing tensor '{name}' of shape \(48, 32\): check"):
        model.load_weights({n: t for n, t in given.items() if n != name}.items())
    with pytest.raises(StartupError, match=rf"tensor '{name}' has shape \(32, 48\), the model needs \(48, 32\)"):
        model.load_weights((given | {name: torch.zeros(32, 48)}).items())
    with pytest.raises(StartupError, match=r"unexpected tensor 'model.layers.0.x': GraniteForCausalLM"):
        model.load_weights((given | {"model.layers.0.x": torch.zeros(1)}).items())


def test_a_missing_expert_is_an_error(folder: Callable[[str], Path]) -> None:
    made = folder("mixtral")
    weights = load_file(made / "model.safetensors")
    (gone,) = (name for name in weights if "layers.1." in name and "experts.4.w2" in name)
    save_file({name: tensor for name, tensor in weights.items() if name != gone}, made / "model.safetensors")
    files = resolve_model(str(made))
    with pytest.raises(
        StartupError,
        match=r"missing tensor 'model\.layers\.1\.block_sparse_moe\.experts\.4\.w2\.weight' of shape \(64, 96\)",
    ):
        build(load_model_config(files)).load_weights(iter_weights(files))


@pytest.mark.parametrize("name", ["granite", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_bytes_are_those_of_the_loaded_model(name: str, dtype: torch.dtype) -> None:
    hf = tiny_config(name).to_dict()
    architecture = {"granite": "GraniteForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}[name]
    files = ModelFiles(name="m", root=Path(), load_format="dummy", config=hf | {"architectures": [architecture]})
    config = load_model_config(files)
    meta = build_model(config, impl="transformers", dtype=dtype, device="meta", max_model_len=32)
    planned = planned_weights_bytes(meta)
    model = build(config, dtype)
    model.load_weights(dummy(model).items())
    model.finish_loading()
    assert planned == pytest.approx(model.weights_bytes(), rel=0.02)


def test_a_call_with_other_heads_never_reaches_the_kernel(folder: Callable[[str], Path]) -> None:
    """A kernel would write outside its blocks."""
    files = resolve_model(str(folder("granite")))
    model = build(load_model_config(files))
    model.load_weights(iter_weights(files))
    model.finish_loading()
    driver = PagedDriver(model, backend=CpuBackend(model.kv_specs(), 16, torch.float32))
    driver.feed({0: [5, 6, 7]})
    spec = model.specs[1]
    model.specs[1] = replace(spec, kv=replace(spec.kv, num_kv_heads=1))
    with pytest.raises(UnsupportedAttention, match=r"num_kv_heads=2.*the KV cache was made for .*num_kv_heads=1"):
        driver.feed({0: [8]})


def test_decode_steps_are_recorded_and_their_memory_is_planned(
    folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair.open(folder("granite"), max_model_len=LENGTH)
    pair.add(0, list(range(3, 15)))
    for _ in range(5):
        pair.decode([0])
    assert pair.eager.model.forwards - pair.recorded.model.forwards == 3
    assert not [r for r in caplog.messages if "not recorded" in r]
    loaded = [r for r in caplog.messages if "GraniteForCausalLM is run by transformers" in r]
    assert len(loaded) == 2  # a line for each of the pair's models
    config = load_model_config(resolve_model(str(folder("granite"))))
    device, settings = CpuDevice(), EngineConfig(num_gpu_blocks_override=8, max_model_len=LENGTH)
    eager, recorded = (
        plan_memory(replace(settings, enforce_eager=each), device, complete_config(config, "auto")).model.reserve_bytes
        for each in (True, False)
    )
    assert recorded - eager == MOST_BYTES


def test_an_exception_in_a_familys_code_fails_only_its_step(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(folder("granite")), dtype="float32", max_model_len=LENGTH, num_gpu_blocks_override=16)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    before = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    def broken(self: Any, *args: Any, **keywords: Any) -> torch.Tensor:
        raise KeyError("a bug of the family")

    with monkeypatch.context() as patch:
        patch.setattr(GraniteDecoderLayer, "forward", broken)
        (failed,) = llm.generate(prompt, params, use_tqdm=False)
    assert failed.error_kind == "internal"
    assert "a bug of the family" in str(failed.error)
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == before
    llm.shutdown()


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("granite", "GraniteForCausalLM").hf))
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    llm = LLM(str(tmp_path), load_format="dummy", dtype="float32", max_model_len=32, num_gpu_blocks_override=8)
    (output,) = llm.generate({"prompt_token_ids": [5]}, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert output.outputs[0].token_ids
    llm.shutdown()
