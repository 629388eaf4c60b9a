"""`--quantization int8|int4`: a model computes as with its dequantised weights, in the planned memory."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from octavo_engine.devices import device
from octavo_engine.devices.device import CpuDevice, Device
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.runner import weight_formats
from octavo_engine.runner.executor import Executor
from octavo_engine.runner.load import load
from octavo_engine.runner.memory_plan import MemoryPlan, plan_memory
from octavo_engine.runner.model_loading import load_model
from octavo_engine.runner.weight_formats import LOADED_FORMATS, log_expanded, log_quantised
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_files, resolve_model
from octavo_engine.weights.loader import iter_weights, stored_tensors
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import root_hash
from octavo_engine.wire.plan import NewSeq, SeqStep, StepPlan
from octavo_engine.wire.sampling import SamplingParams
from octavo_testing.block_products import MOST_DISTANCE, distance
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.paged import PagedDriver
from octavo_testing.tiny_models import LENGTH, TINY, make_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

DEVICE = CpuDevice()
TOKENS = list(range(3, 40))
KINDS = {"int8": GGMLQuantizationType.Q8_0, "int4": GGMLQuantizationType.Q4_1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def settings(files: ModelFiles, quantization: str | None, **fields: Any) -> EngineConfig:
    known = {"model": files.name, "quantization": quantization, "load_format": files.load_format}
    return EngineConfig(**{**known, "num_gpu_blocks_override": 20, "max_model_len": LENGTH, "num_threads": 1, **fields})


def planned(files: ModelFiles, quantization: str | None, device: Device = DEVICE, **fields: Any) -> MemoryPlan:
    config = settings(files, quantization, **fields)
    return plan_memory(config, device, load_model_config(files), stored_tensors(files))


def loaded(files: ModelFiles, quantization: str | None, **fields: Any) -> Model:
    plan = planned(files, quantization, **fields)
    return load_model(DEVICE, files, load_model_config(files), plan)


def round_trip(tensor: Tensor, quantization: str, *, transposed: bool) -> Tensor:
    kind = KINDS[quantization]
    values = (tensor.mT if transposed else tensor).contiguous().float().numpy()
    found = torch.from_numpy(dequantize(quantize(values, kind), kind)).reshape(values.shape)
    return found.mT if transposed else found


def dequantised(files: ModelFiles, quantization: str, names: frozenset[str]) -> Model:
    """Load the model in bf16 with the weights that the `gguf` package makes of those of these names."""
    config = load_model_config(files)
    model = build_model(config, dtype=torch.bfloat16, device="cpu", max_model_len=LENGTH)
    transposed = config.architecture == "GPT2LMHeadModel"
    model.load_weights(
        (name, round_trip(tensor, quantization, transposed=transposed) if is_quantised(name, names) else tensor)
        for name, tensor in iter_weights(files)
    )
    model.finish_loading()
    return model


def is_quantised(name: str, names: frozenset[str]) -> bool:
    """Return True for the name of a tensor, without the prefix of a bare model, or of a stack of experts."""
    part = name.removesuffix("gate_up_proj").removesuffix("down_proj")
    return any(full.endswith(name) or (part != name and full.startswith(part)) for full in names)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [*((name, "int8") for name in sorted(TINY)), *((name, "int4") for name in ("llama", "gpt2", "phi3", "qwen2_moe"))],
)
def test_logits_are_close_to_those_of_the_dequantised_weights(models: Path, name: str, quantization: str) -> None:
    files = resolve_model(str(make_tiny(name, models)))
    model = loaded(files, quantization)
    names = model.quantised_tensors()
    reference = dequantised(files, quantization, names)
    logits = PagedDriver(model).feed({0: TOKENS})[0]
    assert names
    assert 0 < distance(logits, PagedDriver(reference).feed({0: TOKENS})[0]) < MOST_DISTANCE


@pytest.mark.parametrize(("quantization", "block_bytes"), [("int8", 34), ("int4", 20)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "gpt2"])
def test_the_plan_has_the_bytes_of_the_blocks(models: Path, name: str, quantization: str, block_bytes: int) -> None:
    files = resolve_model(str(make_tiny(name, models)))
    plan, model = planned(files, quantization), loaded(files, quantization)
    shapes = model.named_shapes()
    saved = sum(shapes[each][0] * shapes[each][1] for each in model.quantised_tensors()) * (2 - block_bytes / 32)
    exact = loaded(files, None, dtype="bfloat16").weights_bytes()
    assert plan.dtype == torch.bfloat16
    assert plan.model.weights_bytes == model.weights_bytes()
    assert model.weights_bytes() == exact - saved


def test_head_embedding_and_routers_stay_exact(models: Path) -> None:
    names = loaded(resolve_model(str(make_tiny("qwen2_moe", models))), "int8").quantised_tensors()
    assert not [name for name in names if "embed" in name or "lm_head" in name or name.endswith("gate.weight")]
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in names


def test_layers_whose_inputs_are_no_whole_blocks_are_named_in_one_line(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(resolve_model(str(make_tiny("qwen2_moe", models))), "int4")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=weight_formats.__name__):
        log_quantised(model, LOADED_FORMATS["int4"])
    (message,) = caplog.messages
    assert f"{len(model.quantised_tensors())} tensors were quantised to Q4_1" in message
    assert "18 linear layers stay in bfloat16" in message  # in two layers, eight experts and a shared one
    assert "(40, 56) are not multiples of 32: the first is model.layers.0.mlp.experts.0.down_proj" in message


def test_dummy_weights_are_quantised(models: Path) -> None:
    files = resolve_model(str(make_tiny("llama", models)), load_format="dummy")
    first, second = (PagedDriver(loaded(files, "int8")).feed({0: TOKENS})[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_a_pickled_checkpoint_is_quantised(models: Path, tmp_path: Path) -> None:
    folder = make_tiny("opt", models)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    drivers = [PagedDriver(loaded(resolve_model(str(path)), "int8")) for path in (folder, tmp_path)]
    first, second = (driver.feed({0: TOKENS})[0] for driver in drivers)
    assert torch.equal(first, second)


def test_a_ggufs_tensors_keep_their_types(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A type without a kernel and an unquantised one, each beside a type with one in a fused weight."""
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"), qtype="Q4_0", others={"ffn_up": "MXFP4", "attn_v": "F16"})
    files = resolve_model(str(path))
    model = loaded(files, "int8")
    assert model.quantised_tensors() == {
        f"model.layers.{i}.{part}.weight" for i in range(2) for part in ("mlp.up_proj", "self_attn.v_proj")
    }
    assert "model.layers.0.self_attn.q_proj.weight" in model.block_tensors()
    assert PagedDriver(model).feed({0: TOKENS})[0].isfinite().all()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=weight_formats.__name__):
        log_expanded(stored_tensors(files), model.block_tensors() | model.quantised_tensors(), DEVICE, torch.bfloat16)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float32"}, "--quantization int8 computes in bfloat16: omit --dtype float32"),
        ({"dtype": "float16"}, "--quantization int8 computes in bfloat16: omit --dtype float16"),
    ],
)
def test_what_cannot_be_quantised_is_refused(models: Path, fields: dict[str, Any], message: str) -> None:
    files = resolve_model(str(make_tiny("llama", models)))
    with pytest.raises(StartupError, match=message):
        planned(files, "int8", **fields)


def test_a_device_without_the_kernels_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_model(str(make_tiny("llama", models)))
    monkeypatch.setattr(device, "kernels_expand_blocks", lambda dtype: False)
    with pytest.raises(StartupError, match=r"--quantization int4 needs the native kernels.*OCTAVO_NATIVE"):
        planned(files, "int4")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_names_tensor_and_output(
    models: Path, tmp_path: Path, quantization: str, value: float
) -> None:
    folder = make_tiny("llama", models)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][21, 40] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(StartupError, match=f"tensor '{name}': output 21 has a weight that is infinite"):
        loaded(resolve_model(str(tmp_path)), quantization)


def test_gguf_accepts_gguf_files_only(models: Path) -> None:
    folder = make_tiny("llama", models)
    with pytest.raises(StartupError, match=f"{folder}: --quantization gguf, but the checkpoint's method is none"):
        resolve_files(EngineConfig(model=str(folder), quantization="gguf"))


def test_quantised_weights_have_a_hash_root_of_their_own(models: Path) -> None:
    files = resolve_model(str(make_tiny("llama", models)))
    infos = [load(settings(files, each, dtype="bfloat16"))[1] for each in (None, "int8", "int4")]
    assert len({info.hash_root for info in infos}) == 3
    assert all(info.hash_root == root_hash(info.weights_fingerprint, "bfloat16", 16) for info in infos)
    assert infos[0].weights_bytes > infos[1].weights_bytes > infos[2].weights_bytes


def test_the_name_of_a_ggufs_method_does_not_change_the_hash_root(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "qwen2", tiny_model("qwen2"), qtype="Q8_0")
    files = resolve_model(str(path))
    first, second = (load(settings(files, each))[1] for each in (None, "gguf"))
    assert first.hash_root == second.hash_root


def first_logprobs(executor: Executor, seq_id: int) -> Any:
    params = SamplingParams(temperature=0, logprobs=20)
    new = NewSeq(seq_id=seq_id, token_ids=TOKENS, num_prompt_tokens=len(TOKENS), params=params)
    blocks = [[1 + seq_id, 4 + seq_id, 7 + seq_id]]
    step = SeqStep(seq_id=seq_id, start=0, num_tokens=len(TOKENS), sample=True, block_ids=blocks)
    result = executor.submit(StepPlan(step_id=seq_id, new_seqs=[new], seqs=[step])).result()
    assert result.error is None
    return result.seqs[0].logprobs


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_that_are_loaded_again_have_the_same_bits(models: Path, load_format: str) -> None:
    files = resolve_model(str(make_tiny("llama", models)), load_format=load_format)
    executor, _ = load(settings(files, "int4"))
    before = first_logprobs(executor, 0)
    executor.release("weights")
    executor.restore("weights")
    assert first_logprobs(executor, 1) == before
