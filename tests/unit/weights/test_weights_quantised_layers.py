"""Checkpoints of auto-round and compressed-tensors: in blocks and expanded, each weight is theirs, rounded once."""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from octavo_engine.devices.device import CpuDevice
from octavo_engine.models.model import Model
from octavo_engine.ops.native_quantised import QuantisedTensor
from octavo_engine.runner.checkpoint import read_checkpoint
from octavo_engine.runner.memory_plan import MemoryPlan, plan_memory
from octavo_engine.runner.model_loading import load_checkpoint, load_model
from octavo_engine.runner.weight_formats import log_activations, log_expanded
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.gguf_header import GGML_TYPES
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_files, resolve_model
from octavo_engine.weights.loader import iter_weights, stored_tensors
from octavo_engine.wire.errors import StartupError
from octavo_testing.block_products import MOST_DISTANCE, distance
from octavo_testing.paged import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "quantised_checkpoints"
UNPACKED: dict[str, dict[str, str]] = json.loads((FOLDER / "unpacked.json").read_text())
TYPES = {"symmetric": "Q4_0", "zero_points": "Q5_0", "act_order": "Q5_0", "eight_bits": "Q8_0", "awq": "Q5_0",
    "ct_packed": "Q4_0", "ct_zeros": "Q5_0", "ct_int8": "Q8_0"}  # fmt: skip
TOKENS = [*range(3, 16), 5, 5, 9, *range(15, 2, -1)]
DEVICE = CpuDevice()


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def planned(files: ModelFiles, dtype: str = "auto", **fields: Any) -> MemoryPlan:
    config = EngineConfig(model=files.name, dtype=dtype, max_model_len=64, num_gpu_blocks_override=20, **fields)  # type: ignore[arg-type]
    return plan_memory(config, DEVICE, load_model_config(files), stored_tensors(files))


def loaded(files: ModelFiles, dtype: str = "auto", **fields: Any) -> Model:
    return load_model(DEVICE, files, load_model_config(files), planned(files, dtype, **fields))


def changed(tmp_path: Path, tensors: dict[str, Tensor | None], name: str = "symmetric", **settings: Any) -> ModelFiles:
    """Copy a checkpoint with other tensors (None: without it) and settings of `quantization_config`."""
    folder = tmp_path / "m"
    shutil.copytree(FOLDER / name, folder)
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({key: value for key, value in stored.items() if value is not None}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return resolve_model(str(folder))


@pytest.mark.parametrize("name", TYPES)
def test_expanded_weights_are_those_of_their_package_rounded_once(name: str) -> None:
    found = dict(iter_weights(resolve_model(str(FOLDER / name)), dtype=torch.bfloat16))
    assert {key: digest(found[key]) for key in UNPACKED[name]} == UNPACKED[name]
    assert not [
        key
        for key in found
        if key.endswith(("qweight", "qzeros", "scales", "g_idx", "_packed", "_scale", "_shape", "_point"))
    ]


@pytest.mark.parametrize("name", TYPES)
def test_blocks_have_the_values_of_their_package(name: str) -> None:
    files, found = resolve_model(str(FOLDER / name)), {}
    for key, tensor in iter_weights(files, blocks=UNPACKED[name]):
        if key in UNPACKED[name]:
            assert isinstance(tensor, QuantisedTensor)
            values = torch.from_numpy(dequantize(tensor.rows.numpy(), GGMLQuantizationType[tensor.format.name]))
            assert (tensor.order is not None) == (name == "act_order")
            order = torch.arange(values.shape[1]) if tensor.order is None else tensor.order
            found[key] = digest(values[:, order.argsort()])
            assert tensor.format.name == TYPES[name]
    assert found == UNPACKED[name]


@pytest.mark.parametrize("name", TYPES)
def test_a_model_in_blocks_computes_as_the_expanded_one(name: str) -> None:
    files = resolve_model(str(FOLDER / name))
    plan, model = planned(files), loaded(files)
    assert model.block_tensors() == UNPACKED[name].keys()
    assert plan.dtype == torch.bfloat16
    assert plan.model.weights_bytes == model.weights_bytes()
    logits = PagedDriver(model).feed({0: TOKENS})[0]
    expanded = load_model(DEVICE, files, load_model_config(files), planned_without_blocks(files))
    expected = PagedDriver(expanded).feed({0: TOKENS})[0]
    assert 0 < distance(logits, expected) < MOST_DISTANCE


def planned_without_blocks(files: ModelFiles) -> MemoryPlan:
    config = EngineConfig(model=files.name, dtype="bfloat16", max_model_len=64, num_gpu_blocks_override=20)
    return plan_memory(config, DEVICE, load_model_config(files), None)


@pytest.mark.parametrize("name", TYPES)
def test_a_model_computes_as_transformers_with_the_unpacked_weights(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    files = resolve_model(str(FOLDER / name))
    weights = dict(iter_weights(files))
    config = {key: value for key, value in files.config.items() if key not in ("quantization_config", "dtype")}
    reference = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    state = {key: value.float() for key, value in weights.items()}
    report = reference.load_state_dict(state, strict=False)
    assert report.missing_keys == ["lm_head.weight"]  # tied
    assert not report.unexpected_keys
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    logits = PagedDriver(loaded(files, "float32")).feed({0: TOKENS})[0]
    assert expected.std() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_settings_in_a_file_of_their_own_are_read(tmp_path: Path) -> None:
    files = changed(tmp_path, {})
    config = json.loads((files.root / "config.json").read_text())
    (files.root / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (files.root / "config.json").write_text(json.dumps(config))
    assert resolve_model(str(files.root)).quantisation == files.quantisation is not None


def test_biases_of_zeros_for_layers_without_one_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    assert loaded(changed(tmp_path, {name: torch.zeros(64)}))
    with pytest.raises(StartupError, match=f"unexpected tensor '{name}'"):
        loaded(changed(tmp_path / "b", {name: torch.ones(64)}))


@pytest.mark.parametrize("name", UNPACKED)
def test_types_are_those_of_gguf(name: str) -> None:
    found = {info.type for info in stored_tensors(resolve_model(str(FOLDER / name))).values()}
    assert found
    assert found <= {None, *GGML_TYPES.values()}


@pytest.mark.parametrize(
    ("settings", "format_name"),
    [
        ({"group_size": 16}, "gptq of 4 bits in groups of 16"),
        ({"bits": 8, "sym": False}, "gptq of 8 bits in groups of 32 with zero points"),
    ],
    ids=str,
)
def test_what_has_no_blocks_is_expanded(
    tmp_path: Path, settings: dict[str, Any], format_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = "eight_bits" if "bits" in settings else "symmetric"
    tensors: dict[str, Tensor | None] = {}
    if name == "symmetric":
        for key, value in load_file(FOLDER / name / "model.safetensors").items():
            if key.endswith(("qzeros", "scales")):
                tensors[key] = value.repeat_interleave(2, 0)
            if key.endswith("g_idx"):
                tensors[key] = torch.arange(len(value), dtype=torch.int32) // 16
    files = changed(tmp_path, tensors, name, **settings)
    model = loaded(files, "bfloat16")
    assert not model.block_tensors()
    stored = stored_tensors(files)
    assert {info.type for info in stored.values()} == {None}
    with caplog.at_level(logging.INFO):
        log_expanded(stored, model.block_tensors(), DEVICE, torch.bfloat16)
    assert caplog.messages[-1].endswith(f": the kernels do not support {format_name}")
    found = dict(iter_weights(files, dtype=torch.bfloat16))
    assert {key: digest(found[key]) for key in UNPACKED[name]} == UNPACKED[name]


LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scales", torch.full((2, 64), float("inf")).half(), "output 0 has an infinite or NaN scale"),
        ("scales", torch.ones(3, 64).half(), r"shape \(3, 64\), .* 4 bits in groups of 32 of 64 inputs need \(2, 64\)"),
        ("scales", torch.ones(2, 64, dtype=torch.int32), "has the type I32, gptq needs F16"),
        ("qzeros", torch.zeros(2, 8, dtype=torch.int32), "a zero point is 1, but symmetric weights have 8: correct"),
        ("qzeros", torch.zeros(2, 64, dtype=torch.int32), r"has shape \(2, 64\)"),
        ("qzeros", None, "qzeros': check that all weight files are there"),
        ("qweight", torch.zeros(9, 64, dtype=torch.int32), "of 72 inputs need"),
        ("qweight", torch.zeros(8, dtype=torch.int32), "has shape"),
        ("qweight", torch.zeros(8, 64, dtype=torch.int64), "has the type I64"),
        ("qweight", torch.tensor(3, dtype=torch.int32), "of 0 inputs need"),
        ("qweight", torch.zeros(0, 64, dtype=torch.int32), "of 0 inputs need"),
        ("g_idx", torch.full((64,), 2, dtype=torch.int32), "an input has the group 2, but there are 2 groups"),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32), "an input has the group -1"),
        ("g_idx", (torch.arange(64) // 33).int(), "group 0 has 33 inputs, which are no multiple of 32"),
        ("g_idx", torch.zeros(63, dtype=torch.int32), r"has shape \(63,\)"),
    ],
)  # fmt: skip
def test_a_corrupt_layer_is_named_in_one_line(tmp_path: Path, part: str, value: Tensor | None, message: str) -> None:
    files = changed(tmp_path, {f"{LAYER}.{part}": value})
    with pytest.raises(StartupError, match=f"tensor '{LAYER}.*{message}") as failure:
        loaded(files)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("ct_packed", "weight_shape", torch.tensor([64, 60]), r"the shape is \(64, 60\), but the packed weight has"),
        ("ct_packed", "weight_scale", torch.ones(64, 3), r"shape \(64, 3\), .* need \(64, 2\)"),
        ("ct_packed", "weight_scale", torch.full((64, 2), float("nan")), "an infinite or NaN scale"),
        ("ct_packed", "weight_g_idx", torch.full((64,), 2, dtype=torch.int32), "an input has the group 2"),
        ("ct_zeros", "weight_zero_point", None, "check that all weight files are there"),
        ("ct_zeros", "weight_zero_point", torch.zeros(64, 1, dtype=torch.int8), r"has shape \(64, 1\)"),
        ("ct_int8", "weight", torch.zeros(32, 32, dtype=torch.uint8), "has the type U8"),
        ("ct_int8", "weight_zero_point", torch.ones(32, 1, dtype=torch.int8), "a zero point is 129, but symmetric"),
    ],
)
def test_a_corrupt_layer_of_compressed_tensors_is_named(
    tmp_path: Path, name: str, part: str, value: Tensor | None, message: str
) -> None:
    files = changed(tmp_path, {f"{LAYER}.{part}": value}, name)
    with pytest.raises(StartupError, match=f"tensor '{LAYER}.*{message}") as failure:
        loaded(files)
    assert "\n" not in str(failure.value)


def test_inputs_of_compressed_tensors_are_sorted_by_group(tmp_path: Path) -> None:
    groups = torch.arange(64, dtype=torch.int32) % 2
    layers = [key.removesuffix(".weight") for key in UNPACKED["ct_packed"]]
    files = changed(tmp_path, {f"{layer}.weight_g_idx": groups.clone() for layer in layers}, "ct_packed")
    expanded = dict(iter_weights(files))
    for key, tensor in iter_weights(files, blocks=UNPACKED["ct_packed"]):
        if isinstance(tensor, QuantisedTensor):
            assert tensor.order is not None
            values = torch.from_numpy(dequantize(tensor.rows.numpy(), GGMLQuantizationType.Q4_0))
            assert torch.equal(values[:, tensor.order.argsort()], expanded[key])
    assert loaded(files).block_tensors() == UNPACKED["ct_packed"].keys()


def test_activations_have_16_bits(caplog: pytest.LogCaptureFixture) -> None:
    files = resolve_model(str(FOLDER / "ct_int8"))
    model = loaded(files)
    with caplog.at_level(logging.INFO):
        caplog.clear()  # what loading logs depends on the level that earlier tests left
        log_activations(files.quantisation, model)
    (message,) = caplog.messages
    assert "was made for activations of 8 bits; here they have 16 bits" in message


GROUP = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
FLOAT8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "marlin-24"}, "format='marlin-24' is not supported: use one of pack-quantized, int"),
        ({"format": "float-quantized"}, "weights of the type 'int' are not supported: use type float"),
        ({"format": "int-quantized"}, "bits=4 is not supported: use a checkpoint of 8 bits"),
        ({"config_groups": {}}, "config_groups of .* are not supported"),
        ({"config_groups": {"a": GROUP, "b": GROUP}}, r"config_groups of \['a', 'b'\] are not supported"),
        ({"config_groups": {"a": {"weights": FLOAT8}}}, "weights of the type 'float' are not supported"),
        ({"config_groups": {"a": {"weights": GROUP["weights"] | {"num_bits": 3}}}}, "bits=3 is not supported"),
        ({"config_groups": {"a": {"weights": GROUP["weights"] | {"strategy": "block"}}}}, "strategy='block' is not"),
        ({"config_groups": {"a": GROUP | {"input_activations": FLOAT8}}}, "input_activations=.* are not supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        ({"ignore": "lm_head"}, "ignore='lm_head' is invalid: it must be a list"),
        ({"ignore": [1]}, r"ignore=\[1\] is invalid: it must be a list of names"),
    ],
)
def test_unknown_settings_of_compressed_tensors_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=f"compressed-tensors checkpoint: .*{message}"):
        changed(tmp_path, {}, "ct_packed", **settings)


def test_an_error_quotes_a_part_of_a_long_setting(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"ignore=\[0, 0.* list of names\.$") as failure:
        changed(tmp_path, {}, "ct_packed", ignore=[0] * 100_000)
    assert len(str(failure.value)) < 2100


def test_fused_parts_with_different_orders_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj"
    order = torch.arange(63, -1, -1, dtype=torch.int32) // 32
    files = changed(tmp_path, {f"{name}.g_idx": order}, "act_order")
    with pytest.raises(StartupError, match="inputs have another order than those of the other parts"):
        loaded(files)
    assert loaded(files, "float32")


def test_a_part_that_is_quantised_while_it_loads_has_no_order(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj"
    packed = dict.fromkeys(f"{name}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    weight = torch.full((32, 64), 0.5).half()
    files = changed(tmp_path, packed | {f"{name}.weight": weight}, "symmetric")
    assert loaded(files, quantization="int8").quantised_tensors() == {f"{name}.weight"}
    files = changed(tmp_path / "b", packed | {f"{name}.weight": weight}, "act_order")
    with pytest.raises(StartupError, match="inputs have another order than those of the other parts"):
        loaded(files, quantization="int8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "bits=3 is not supported"),
        ({"bits": None}, "bits=None is not supported"),
        ({"group_size": 0}, "group_size=0 is invalid"),
        ({"group_size": "32"}, "group_size='32' is invalid"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic=.* is not supported"),
        ({"quant_method": "quark"}, "quantisation method 'quark'"),
        ({"quant_method": "awq", "bits": 8}, "awq checkpoint: bits=8 is not supported: use a checkpoint of 4 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv' is not supported"),
        ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' is invalid"),
    ],
)
def test_unknown_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        changed(tmp_path, {}, **settings)


def test_the_method_must_be_that_of_the_checkpoint() -> None:
    folder = str(FOLDER / "symmetric")
    assert resolve_files(EngineConfig(model=folder, quantization="gptq"))
    for quantization in ("gguf", "awq"):
        with pytest.raises(StartupError, match=f"--quantization {quantization}, but the checkpoint's method is gptq"):
            resolve_files(EngineConfig(model=folder, quantization=quantization))  # type: ignore[arg-type]


@pytest.mark.parametrize("load_format", ["dummy", "pt"])
def test_other_load_formats_are_refused(tmp_path: Path, load_format: str) -> None:
    shutil.copytree(FOLDER / "symmetric", tmp_path / "m")
    torch.save({}, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(StartupError, match=f"load format '{load_format}' is not supported"):
        resolve_model(str(tmp_path / "m"), load_format=load_format)


def test_a_list_of_exceptions_that_names_no_tensor_gives_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        stored_tensors(changed(tmp_path, {}, "awq", modules_to_not_convert=["mlp.down_proj", "lm_head"]))
        assert not caplog.messages
        stored_tensors(changed(tmp_path / "b", {}, "awq", modules_to_not_convert=["visual", "audio"]))
        assert caplog.messages == ["quantization_config: no tensor has a name with one of visual, audio"]
        hostile = ["re:([a-z._0-9]+)+!", "re:("]  # the first one would take centuries
        stored_tensors(changed(tmp_path / "c", {}, "awq", modules_to_not_convert=hostile))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["symmetric", "ct_packed", "ct_int8"])
def test_layers_with_scales_that_are_no_fp16_numbers_are_expanded(
    tmp_path: Path, name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """One layer has a scale that fp16 does not hold; the others stay in blocks, also with scales of another type."""
    part = "scales" if name == "symmetric" else "weight_scale"
    scales = load_file(FOLDER / name / "model.safetensors")[f"{LAYER}.{part}"].to(dtype)
    scales[0, 0] = 1e-9
    files = changed(tmp_path, {f"{LAYER}.{part}": scales}, name)
    model = loaded(files)
    assert model.block_tensors() == UNPACKED[name].keys() - {f"{LAYER}.weight"}
    with caplog.at_level(logging.INFO):
        log_expanded(stored_tensors(files), model.block_tensors(), DEVICE, torch.bfloat16)
    assert caplog.messages[-1].endswith("with scales that are no fp16 numbers")


@pytest.mark.parametrize(("dtype", "num_blocks"), [("float32", 0), ("bfloat16", 7)])
def test_layers_of_models_that_transformers_runs_stay_in_blocks(dtype: str, num_blocks: int) -> None:
    files = resolve_model(str(FOLDER / "symmetric"))
    settings = {"dtype": dtype, "max_model_len": 64, "num_gpu_blocks_override": 20}
    config = EngineConfig(model=files.name, model_impl="transformers", **settings)  # type: ignore[arg-type]
    checkpoint = read_checkpoint(config, files)
    plan = plan_memory(config, DEVICE, checkpoint.config, checkpoint.stored)
    model = load_checkpoint(DEVICE, checkpoint, plan, config=config).model
    assert len(plan.block_formats) == len(model.block_tensors()) == num_blocks
    assert plan.model.weights_bytes == model.weights_bytes()
    if not num_blocks:  # steps in bf16 round in other places than the own class does
        expected = PagedDriver(loaded(files, dtype)).feed({0: TOKENS})[0]
        torch.testing.assert_close(PagedDriver(model).feed({0: TOKENS})[0], expected)
