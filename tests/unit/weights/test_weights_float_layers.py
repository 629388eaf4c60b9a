"""Checkpoints in FP8 and of bitsandbytes: each weight is that of the package, and faults end the start in one line."""

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.devices.device import CpuDevice
from octavo_engine.models.model import Model
from octavo_engine.runner.memory_plan import plan_memory
from octavo_engine.runner.model_loading import load_model
from octavo_engine.runner.weight_formats import log_expanded
from octavo_engine.settings.config import EngineConfig
from octavo_engine.sources.fingerprint import weights_fingerprint
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_files, resolve_model
from octavo_engine.weights.loader import iter_weights, stored_tensors
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import root_hash
from octavo_testing.paged import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "quantised_checkpoints"
UNPACKED: dict[str, dict[str, str]] = json.loads((FOLDER / "unpacked_floats.json").read_text())
TOKENS = [*range(3, 16), 5, 5, 9, *range(15, 2, -1)]
DEVICE = CpuDevice()
LAYER = "model.layers.0.mlp.down_proj"
Tensors = dict[str, Tensor | None]
#: The method fp8 with the tensors of a checkpoint of compressed-tensors -> its settings.
FP8 = {
    "fp8_tensor": {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8_channel": {"activation_scheme": "dynamic"},
    "fp8_block": {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def saved(folder: Path, name: str, tensors: Tensors, settings: dict[str, Any], *, replace: bool = False) -> ModelFiles:
    """Copy a checkpoint with other tensors (None: without it) and settings of `quantization_config`."""
    shutil.copytree(FOLDER / name, folder)
    stored = load_file(folder / "model.safetensors") | tensors
    save_file({key: value for key, value in stored.items() if value is not None}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings if replace else config["quantization_config"] | settings
    (folder / "config.json").write_text(json.dumps(config))
    return resolve_model(str(folder))


def changed(tmp_path: Path, name: str, tensors: Tensors, **settings: Any) -> ModelFiles:
    return saved(tmp_path / "m", name, tensors, settings)


def as_fp8_method(folder: Path, name: str, scales: str = "weight_scale") -> ModelFiles:
    """Copy a checkpoint of compressed-tensors as one of the method fp8."""
    tensors: Tensors = {}
    for key, value in load_file(FOLDER / name / "model.safetensors").items():
        if key.endswith(".weight_scale"):
            tensors |= {key: None, f"{key.removesuffix('weight_scale')}{scales}": value}
    return saved(folder, name, tensors, {"quant_method": "fp8"} | FP8[name], replace=True)


def loaded(files: ModelFiles, dtype: str = "float32", **fields: Any) -> Model:
    config = EngineConfig(model=files.name, dtype=dtype, max_model_len=64, num_gpu_blocks_override=20, **fields)  # type: ignore[arg-type]
    model_config = load_model_config(files)
    return load_model(DEVICE, files, model_config, plan_memory(config, DEVICE, model_config, stored_tensors(files)))


@pytest.mark.parametrize("name", UNPACKED)
def test_weights_are_those_of_their_package_and_are_rounded_once(name: str) -> None:
    files = resolve_model(str(FOLDER / name))
    found = dict(iter_weights(files))
    assert {key: digest(found[key]) for key in UNPACKED[name]} == UNPACKED[name]
    assert len(found) == len(UNPACKED[name]) + 4
    for dtype in (torch.bfloat16, torch.float16):
        rounded = dict(iter_weights(files, dtype=dtype))
        assert rounded.keys() == found.keys()
        for key in UNPACKED[name]:
            assert torch.equal(rounded[key], found[key].to(dtype))


@pytest.mark.parametrize("scales", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("name", FP8)
def test_the_method_fp8_has_the_same_weights(name: str, scales: str, tmp_path: Path) -> None:
    found = dict(iter_weights(as_fp8_method(tmp_path / "m", name, scales)))
    assert {key: digest(found[key]) for key in UNPACKED[name]} == UNPACKED[name]
    assert len(found) == len(UNPACKED[name]) + 4


def test_scales_of_any_shape_and_type_are_read(tmp_path: Path) -> None:
    stored = load_file(FOLDER / "fp8_tensor" / "model.safetensors")
    parts = {key: value for key, value in stored.items() if key.endswith("weight_scale")}
    expected = dict(iter_weights(changed(tmp_path, "fp8_tensor", {key: x.bfloat16() for key, x in parts.items()})))
    for at, shape in enumerate([(), (1,), (1, 1)]):
        tensors: Tensors = {key: value.bfloat16().float().view(shape) for key, value in parts.items()}
        found = dict(iter_weights(changed(tmp_path / str(at), "fp8_tensor", tensors)))
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    stored = load_file(FOLDER / "fp8_channel" / "model.safetensors")
    tensors = {key: value.flatten() for key, value in stored.items() if key.endswith("weight_scale")}
    found = dict(iter_weights(changed(tmp_path / "flat", "fp8_channel", tensors)))
    assert {key: digest(found[key]) for key in UNPACKED["fp8_channel"]} == UNPACKED["fp8_channel"]


@pytest.mark.parametrize("name", UNPACKED)
def test_a_model_computes_as_transformers_with_the_unpacked_weights(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    files = resolve_model(str(FOLDER / name))
    config = {key: value for key, value in files.config.items() if key not in ("quantization_config", "dtype")}
    reference = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    report = reference.load_state_dict({key: x.float() for key, x in iter_weights(files)}, strict=False)
    assert report.missing_keys == ["lm_head.weight"]  # tied
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    model = loaded(files)
    torch.testing.assert_close(PagedDriver(model).feed({0: TOKENS})[0], expected, rtol=1e-3, atol=1e-3)
    assert expected.std() > 0.5
    assert not model.block_tensors()
    with caplog.at_level(logging.INFO):
        log_expanded(stored_tensors(files), model.block_tensors(), DEVICE, torch.bfloat16)
    codes = name.removeprefix("bnb_") if name.startswith("bnb") else "e4m3"
    assert caplog.messages[-1].startswith("7 quantised tensors are expanded to bfloat16")
    assert caplog.messages[-1].endswith(f" in {codes}")


def test_expanded_layers_can_be_quantised_while_they_load(tmp_path: Path) -> None:
    files = resolve_model(str(FOLDER / "fp8_block"))
    assert loaded(files, "auto", quantization="int8").quantised_tensors() == UNPACKED["fp8_block"].keys()


def test_replicas_with_other_methods_have_other_block_hashes(tmp_path: Path) -> None:
    """Equal weights of two methods have different names in the cache, too: their products may differ."""
    folders = [resolve_model(str(FOLDER / name)) for name in UNPACKED]
    folders += [as_fp8_method(tmp_path / name, name) for name in FP8]
    assert len({root_hash(weights_fingerprint(files), "bfloat16", 16) for files in folders}) == len(folders)


@pytest.mark.parametrize("name", ["fp8_block", "bnb_nf4", "bnb_int8"])
def test_tensors_of_modules_that_other_stages_have_are_not_read(name: str) -> None:
    elsewhere = {key.removesuffix(".weight") for key in UNPACKED[name]}
    found = dict(iter_weights(resolve_model(str(FOLDER / name)), skipped=elsewhere))
    assert sorted(found) == sorted(key for key in load_file(FOLDER / name / "model.safetensors") if "_proj" not in key)


def test_settings_that_change_nothing_here_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM writes scales of the KV cache beside the projections, or into the attention."""
    cache_scales: Tensors = {
        f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_scale", "k_proj.output_scale")
    }
    files = changed(tmp_path, "fp8_tensor", cache_scales, kv_cache_scheme={"num_bits": 8, "type": "float"})
    with caplog.at_level(logging.INFO):
        assert loaded(files)
    message = "the checkpoint was made for a quantised KV cache (kv_cache_scheme); see --kv-cache-dtype"
    assert caplog.messages[0].partition(":")[0] == message
    assert not [name for name in dict(iter_weights(files)) if name.endswith("scale")]


BLOCKS = torch.full((1, 2), 0.5)


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("fp8_block", "weight", torch.full((64, 160), float("nan")).to(torch.float8_e4m3fn),
            "weight': output 0 has a weight that is not a number"),
        ("fp8_block", "weight", torch.zeros(64, 160).to(torch.float8_e5m2), "type F8_E5M2, .* F8_E4M3: use another"),
        ("fp8_block", "weight", torch.zeros(64, 160).bfloat16(), "type BF16, .* needs F8_E4M3"),
        ("fp8_block", "weight_scale", BLOCKS * 0, "a scale is 0.0, but it must be a positive number: download"),
        ("fp8_block", "weight_scale", BLOCKS * -1, "a scale is -0.5"),
        ("fp8_block", "weight_scale", BLOCKS / 0, "a scale is inf"),
        ("fp8_block", "weight_scale", BLOCKS * float("nan"), "a scale is nan"),
        ("fp8_block", "weight_scale", torch.ones(2, 2), r"shape \(2, 2\), .* need \(1, 2\)"),
        ("fp8_block", "weight_scale", torch.ones(1, 2).int(), "type I32, .* needs F16 or BF16 or F32"),
        ("fp8_block", "weight_scale", None, "weight_scale': check that all weight files"),
        ("fp8_tensor", "input_scale", torch.zeros(1), "input_scale': a scale is 0.0"),
        ("fp8_tensor", "input_scale", torch.ones(2), r"shape \(2,\)"),
        ("fp8_channel", "weight_scale", torch.ones(3, 1), r"shape \(3, 1\), .* need \(32, 1\)"),
        ("fp8_channel", "weight", torch.zeros(32, 48, 1).to(torch.float8_e4m3fn), r"shape \(32, 48, 1\)"),
        ("bnb_int8", "SCB", None, "SCB': check that all weight files are there"),
        ("bnb_int8", "SCB", torch.full((32,), float("inf")), "SCB': output 0 has an infinite or NaN scale"),
        ("bnb_int8", "SCB", torch.ones(31), r"shape \(31,\)"),
        ("bnb_int8", "weight_format", torch.tensor(1, dtype=torch.uint8), r"format 1, but only rows \(0\)"),
        ("bnb_int8", "weight", torch.zeros(32, 48), "type F32, .* needs I8"),
        ("bnb_nf4", "weight", torch.zeros(9, 1, dtype=torch.uint8), "it has 9 bytes, but 10240 weights need 5120"),
        ("bnb_nf4", "weight.quant_state.bitsandbytes__nf4", None, "nf4': check that all weight files are"),
        ("bnb_nf4", "weight.quant_state.bitsandbytes__nf4", torch.ones((), dtype=torch.uint8), "it is not JSON"),
        ("bnb_nf4", "weight.quant_state.bitsandbytes__nf4", torch.ones(2, 2, dtype=torch.uint8), "it is not JSON"),
        ("bnb_nf4", "weight.absmax", torch.zeros(9, dtype=torch.uint8), "it has 9 values, but 10240 in blocks of 64"),
        ("bnb_nf4", "weight.absmax", torch.zeros(160, dtype=torch.int32), "type I32"),
        ("bnb_nf4", "weight.nested_absmax", None, "nested_absmax': it is missing, but absmax is quantised"),
        ("bnb_nf4", "weight.nested_absmax", torch.zeros(2), "it has 2 values, but 160 in blocks of 256 need 1"),
        ("bnb_nf4", "weight.nested_absmax", torch.full((1,), float("nan")), "an infinite or NaN scale"),
        ("bnb_nf4", "weight.nested_quant_map", torch.zeros(16), r"shape \(16,\)"),
        ("bnb_nf4", "weight.quant_map", torch.zeros(15), r"shape \(15,\)"),
        ("bnb_nf4", "weight.quant_map", torch.full((16,), float("inf")), "quant_map': a number of the table is inf"),
        ("bnb_fp4", "weight.absmax", torch.full((96,), float("-inf")), "an infinite or NaN scale"),
    ],
)  # fmt: skip
def test_a_corrupt_layer_is_named_in_one_line(
    tmp_path: Path, name: str, part: str, value: Tensor | None, message: str
) -> None:
    with pytest.raises(StartupError, match=f"tensor '{LAYER}.*{message}") as failure:
        loaded(changed(tmp_path, name, {f"{LAYER}.{part}": value}))
    assert "\n" not in str(failure.value)


def test_missing_scales_have_the_name_that_other_layers_give_theirs(tmp_path: Path) -> None:
    files = as_fp8_method(tmp_path / "m", "fp8_block", "weight_scale_inv")
    path = files.root / "model.safetensors"
    save_file({key: x for key, x in load_file(path).items() if key != f"{LAYER}.weight_scale_inv"}, path)
    with pytest.raises(StartupError, match=f"missing tensor '{LAYER}.weight_scale_inv'"):
        stored_tensors(files)


def test_a_name_of_many_parts_is_read_soon(tmp_path: Path) -> None:
    files = changed(tmp_path, "fp8_block", {"a." * 500_000 + "b": torch.ones(1)})
    assert f"{LAYER}.weight" in stored_tensors(files)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b"{", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b" " * (1 << 20) + b"{", "it has 1048577 bytes, the limit is 1048576"),
        (b"[]", "it is no JSON object"),
        ({"quant_type": "int3"}, "quant_type is 'int3' instead of 'nf4': use a checkpoint of nf4 or fp4"),
        ({"blocksize": 0}, "blocksize is 0"),
        ({"blocksize": "64"}, "blocksize is '64'"),
        ({"blocksize": 128}, "it has 160 values, but 10240 in blocks of 128 need 80"),
        ({"shape": [64]}, r"shape is \[64\] instead of two positive numbers"),
        ({"shape": [64, -160]}, "shape is"),
        ({"shape": [64, 159]}, "it has 5120 bytes, but 10176 weights need 5088"),
        ({"shape": [160, 64]}, r"has shape \(160, 64\), the model needs \(64, 160\)"),
        ({"nested_blocksize": None}, "nested_blocksize is None"),
        ({"nested_offset": None}, "nested_offset is None"),
        ({"nested_offset": True}, "nested_offset is True"),
        ({"nested_offset": 10**400}, "nested_offset is 10*0 instead of a number of fp32"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_corrupt_state_is_named_in_one_line(tmp_path: Path, state: bytes | dict[str, Any], message: str) -> None:
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    given = json.loads(bytes(load_file(FOLDER / "bnb_nf4" / "model.safetensors")[name].tolist()))
    raw = state if isinstance(state, bytes) else json.dumps(given | state).encode()
    files = changed(tmp_path, "bnb_nf4", {name: torch.tensor(list(raw), dtype=torch.uint8)})
    with pytest.raises(StartupError, match=f"tensor '{LAYER}.*{message}") as failure:
        loaded(files)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("size", [10240, 10241, 2**40, 2**62, 2**70])
def test_a_block_that_is_larger_than_its_layer_takes_no_more_memory(size: int, tmp_path: Path) -> None:
    """Each number is valid: a layer that is smaller than a block has one scale."""
    state = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    stored = load_file(FOLDER / "bnb_nf4" / "model.safetensors")
    given = json.loads(bytes(stored[state].tolist()))
    raw = json.dumps(given | {"blocksize": size, "nested_blocksize": size}).encode()
    absmax = torch.tensor([7], dtype=torch.uint8)
    tensors: Tensors = {state: torch.tensor(list(raw), dtype=torch.uint8), f"{LAYER}.weight.absmax": absmax}
    found = dict(iter_weights(changed(tmp_path, "bnb_nf4", tensors)))[f"{LAYER}.weight"]
    scale = stored[f"{LAYER}.weight.nested_quant_map"][7] * stored[f"{LAYER}.weight.nested_absmax"]
    assert float(found.max()) == pytest.approx(float(scale + given["nested_offset"]))
    one: Tensors = {key: x[:1, :1] for key, x in load_file(FOLDER / "fp8_block" / "model.safetensors").items()
        if key.endswith("weight_scale")}  # fmt: skip
    settings = {"quant_method": "fp8", "weight_block_size": [size, size]}
    found = dict(iter_weights(saved(tmp_path / "fp8", "fp8_block", one, settings, replace=True)))
    codes = load_file(FOLDER / "fp8_block" / "model.safetensors")[f"{LAYER}.weight"].float()
    assert torch.equal(found[f"{LAYER}.weight"], codes * one[f"{LAYER}.weight_scale"])  # type: ignore[operator]


def test_an_unknown_kind_of_state_is_named(tmp_path: Path) -> None:
    state = "weight.quant_state.bitsandbytes__"
    stored = load_file(FOLDER / "bnb_nf4" / "model.safetensors")
    tensors = {f"{LAYER}.{state}nf4": None, f"{LAYER}.{state}int3": stored[f"{LAYER}.{state}nf4"]}
    with pytest.raises(StartupError, match=f"missing tensor '{LAYER}.{state}nf4'"):
        loaded(changed(tmp_path, "bnb_nf4", tensors))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("name", "key"), [("fp8_block", "model.norm.weight"), ("bnb_nf4", "model.norm.bias")])
def test_eight_bits_without_scales_are_refused(tmp_path: Path, name: str, key: str, dtype: torch.dtype) -> None:
    with pytest.raises(StartupError, match=r"tensor 'model\.norm\.(weight|bias).*'") as failure:
        loaded(changed(tmp_path, name, {key: torch.ones(64).to(dtype)}))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fmt": "e5m2"}, "fmt='e5m2' is not supported: use a checkpoint of e4m3"),
        ({"activation_scheme": "token"}, "activation_scheme='token' is not supported"),
        ({"weight_block_size": 128}, "weight_block_size=128 is invalid"),
        ({"weight_block_size": [128, 0]}, "is invalid: it must be two positive numbers"),
        ({"weight_block_size": [128]}, "is invalid"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' is invalid"),
        ({"quant_method": ["fp8"]}, r"method \['fp8'\] \(quantization_config\) is not supported"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["-:a"]}, r"dynamic=\['-:a'\] is invalid"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": 5}, "dynamic=5 is invalid: it must be an object of patterns"),
        ({"quant_method": "compressed-tensors", "config_groups": 7}, "config_groups of 7 are not supported"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}}}, "format": ["x"]},
            r"format=\['x'\] is not supported",
        ),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit=False and load_in_8bit=False are not supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit=True and"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int3"}, "'int3' is not supp"),
    ],
    ids=str,
)
def test_unknown_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as failure:
        saved(tmp_path / "m", "fp8_block", {}, {"quant_method": "fp8"} | settings, replace=True)
    assert "\n" not in str(failure.value)


WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weights": WEIGHTS | {"strategy": "group"}}, "strategy='group' is not supported: use one of tensor, channel"),
        ({"weights": WEIGHTS | {"strategy": "block"}}, "block_structure is missing"),
        ({"weights": WEIGHTS | {"num_bits": 4}}, "bits=4 is not supported: use a checkpoint of 8 bits"),
        ({"weights": WEIGHTS | {"type": "int"}}, "weights of the type 'int' are not supported: use type float"),
        ({"weights": WEIGHTS, "input_activations": {"num_bits": 8, "type": "int"}}, "input_activations=.* are not"),
    ],
    ids=str,
)
def test_unknown_settings_of_compressed_tensors_are_refused(
    tmp_path: Path, group: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        changed(tmp_path, "fp8_channel", {}, config_groups={"group_0": group})


def test_the_method_must_be_that_of_the_checkpoint(tmp_path: Path) -> None:
    fp8 = str(as_fp8_method(tmp_path / "m", "fp8_block").root)
    assert resolve_files(EngineConfig(model=fp8, quantization="fp8"))
    assert resolve_files(EngineConfig(model=str(FOLDER / "bnb_nf4"), quantization="bitsandbytes"))
    for folder, quantization, method in (
        (str(FOLDER / "awq"), "fp8", "awq"),
        (str(FOLDER / "fp8_block"), "fp8", "compressed-tensors"),
        (fp8, "bitsandbytes", "fp8"),
    ):
        with pytest.raises(StartupError, match=f"--quantization {quantization}, but .* method is {method}: omit it"):
            resolve_files(EngineConfig(model=folder, quantization=quantization))  # type: ignore[arg-type]
