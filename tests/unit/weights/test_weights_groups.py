"""Groups have the weights that the readers expand, bit for bit, for every method; their inputs may have an order."""

import json
from pathlib import Path

import pytest
import torch
from octavo_engine.ops.group_tensor import GroupTensor, expand_groups
from octavo_engine.sources.gguf_header import read_gguf
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import group_format, iter_weights, stored_tensors
from octavo_engine.wire.errors import StartupError
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "quantised_checkpoints"
#: Checkpoint -> codes, the sizes of groups, type of the scales, and offsets.
GROUPS = {
    "symmetric": ("int4", {32}, torch.float16, "none"),
    "zero_points": ("int4", {64}, torch.float16, "zeros"),
    "act_order": ("int4", {32}, torch.float16, "zeros"),
    "eight_bits": ("int8", {32}, torch.float16, "none"),
    "awq": ("int4", {32}, torch.float16, "zeros"),
    "ct_packed": ("int4", {32}, torch.bfloat16, "none"),
    "ct_zeros": ("int4", {64}, torch.bfloat16, "zeros"),
    "ct_int8": ("int8", {32}, torch.bfloat16, "none"),
    "fp8_tensor": ("e4m3", {32}, torch.float32, "none"),
    "fp8_channel": ("e4m3", {32}, torch.float32, "none"),
    "fp8_block": ("e4m3", {64}, torch.float32, "none"),
    "bnb_nf4": ("table4", {32, 64}, torch.float32, "none"),
    "bnb_fp4": ("table4", {32, 64}, torch.float32, "none"),
    "bnb_int8": ("int8", {32}, torch.float32, "none"),
}
#: Checkpoints in which one weight is not in groups: a row of 48 or 160 inputs is not whole groups of a multiple of 32.
EXPANDED = {"fp8_tensor", "fp8_channel", "fp8_block", "bnb_int8"}


def in_groups(files: ModelFiles) -> dict[str, GroupTensor]:
    names = {name for name, info in stored_tensors(files).items() if group_format(info) is not None}
    found = {name: tensor for name, tensor in iter_weights(files, groups=names) if name in names}
    assert all(isinstance(each, GroupTensor) for each in found.values())
    return found


def expanded(tensor: GroupTensor, dtype: torch.dtype) -> Tensor:
    """Expand a weight, with the inputs as they are numbered."""
    values = expand_groups(tensor, dtype)
    return values if tensor.order is None else values[:, tensor.order.argsort()]


def assert_equal_weights(files: ModelFiles, found: dict[str, GroupTensor], dtype: torch.dtype) -> None:
    expected = dict(iter_weights(files, dtype=dtype))
    for name, tensor in found.items():
        assert tensor.shape == tuple(expected[name].shape)
        assert torch.equal(expanded(tensor, dtype), expected[name]), name


@pytest.mark.parametrize("name", GROUPS)
def test_groups_have_the_expanded_weights(name: str) -> None:
    files = resolve_model(str(FOLDER / name))
    found = in_groups(files)
    assert len(found) == 7 - (name in EXPANDED)
    formats = [tensor.format for tensor in found.values()]
    assert {each.group_size for each in formats} == GROUPS[name][1]
    assert {(each.codes, each.scale_dtype, each.offsets) for each in formats} == {
        (GROUPS[name][0], *GROUPS[name][2:])
    }  # fmt: skip
    assert all((tensor.order is not None) == (name == "act_order") for tensor in found.values())
    for tensor in found.values():
        assert tensor.scales.dtype == tensor.format.scale_dtype
        assert tensor.scales.is_contiguous()
    for dtype in (torch.float16, torch.bfloat16):
        assert_equal_weights(files, found, dtype)
    if name != "bnb_int8":  # whose scale is a product of two, which is rounded before it multiplies a code
        assert_equal_weights(files, found, torch.float32)


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q8_0"])
def test_groups_of_gguf_have_the_expanded_weights(qtype: str, tmp_path: Path) -> None:
    """Rows of q and k are interleaved in the file."""
    write_tiny_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), qtype=qtype, others={"ffn_up": "Q5_1"})
    files = resolve_model(str(tmp_path / "m.gguf"))
    found = in_groups(files)
    assert {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"} <= found.keys()
    assert "model.layers.0.mlp.up_proj.weight" not in found
    assert {tensor.format.group_size for tensor in found.values()} == {32}
    for dtype in (torch.float16, torch.float32):
        assert_equal_weights(files, found, dtype)
        assert all(tensor.scales.dtype == torch.float16 for tensor in found.values())


def test_groups_take_the_bytes_of_the_file() -> None:
    """AWQ has zero points of 4 bits, which take a byte in memory."""
    files = resolve_model(str(FOLDER / "awq"))
    sizes = {name: info.num_bytes for name, info in stored_tensors(files).items()}
    for name, tensor in in_groups(files).items():
        num_zeros = tensor.scales.numel()
        assert tensor.nbytes == sizes[name] + num_zeros // 2


def changed(tmp_path: Path, name: str, tensors: dict[str, Tensor]) -> ModelFiles:
    for path in (FOLDER / name).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(load_file(tmp_path / "model.safetensors") | tensors, tmp_path / "model.safetensors")
    return resolve_model(str(tmp_path))


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("fp8_tensor", "weight", torch.full((32, 32), float("nan")).to(torch.float8_e4m3fn), "output 0 has a weight"),
        ("fp8_tensor", "weight", torch.ones(32, 32).index_fill(0, torch.tensor([20, 13]), float("nan")).to(
            torch.float8_e4m3fn), "output 13 has a weight"),
        ("fp8_tensor", "weight_scale", torch.zeros(1), "a scale is 0.0, but it must be a positive number"),
        ("awq", "scales", torch.full((2, 64), torch.inf).half(), "output 0 has an infinite or NaN scale"),
        ("symmetric", "qzeros", torch.zeros(2, 8, dtype=torch.int32), "a zero point is 1, but symmetric weights"),
        ("act_order", "g_idx", (torch.arange(64) // 48).int(), "group 0 has 48 inputs, which are no multiple of 32"),
    ],
)  # fmt: skip
def test_a_corrupt_layer_is_named_in_one_line(
    name: str, part: str, value: Tensor, message: str, tmp_path: Path
) -> None:
    files = changed(tmp_path, name, {f"{LAYER}.{part}": value})
    with pytest.raises(StartupError, match=f"tensor '{LAYER}.{part}': .*{message}") as failure:
        in_groups(files)
    assert "\n" not in str(failure.value)


def test_a_corrupt_state_of_bitsandbytes_is_named_when_its_layer_is_read(tmp_path: Path) -> None:
    part = "weight.quant_state.bitsandbytes__nf4"
    state = json.dumps({"quant_type": "nf4", "blocksize": 0, "shape": [32, 32]})
    files = changed(tmp_path, "bnb_nf4", {f"{LAYER}.{part}": torch.tensor(list(state.encode()), dtype=torch.uint8)})
    with pytest.raises(StartupError, match=f"tensor '{LAYER}.{part}': blocksize is 0 instead of a positive number"):
        dict(iter_weights(files, groups=in_groups(files)))


def test_a_scale_of_gguf_that_is_not_finite_names_tensor_and_row(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "qwen2", tiny_model("qwen2"), qtype="Q4_1")
    files = resolve_model(str(path))
    info = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    for at in (0, 2):  # the scale, and the minimum
        content = bytearray(path.read_bytes())
        place = info.offset + 5 * info.num_bytes // info.shape[0] + at
        content[place : place + 2] = b"\x00\x7c"  # an infinite number
        broken = tmp_path / f"{at}.gguf"
        broken.write_bytes(content)
        with pytest.raises(StartupError, match=r"'blk\.1\.ffn_up\.weight': row 5 has an infinite or NaN scale"):
            in_groups(resolve_model(str(broken)))
    assert in_groups(files)
