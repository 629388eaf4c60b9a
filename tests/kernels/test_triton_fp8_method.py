"""Linear layers of FP8 checkpoints: which of them round their inputs, and by which scale."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from octavo_engine.devices.cuda_device import CudaDevice
from octavo_engine.layers.group_method import GroupMethod
from octavo_engine.layers.layer import BuildContext
from octavo_engine.layers.linear import Linear
from octavo_engine.layers.linear_method import LinearSpec
from octavo_engine.ops.group_tensor import GroupFormat, GroupTensor, expand_groups
from octavo_engine.runner.weight_formats import kept_formats
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights.loader import stored_tensors
from octavo_testing.group_weights import random_groups
from octavo_testing.kernel_cases import random
from octavo_testing.quantised_tiny import make_quantised
from octavo_testing.triton_device import exact_e4m3
from torch import Tensor

SIZE = 256
FP8 = GroupFormat(name="e4m3", codes="e4m3", group_size=SIZE, scale_dtype=torch.float32, rounds_inputs=True)
GPU = CudaDevice()


@pytest.fixture(autouse=True)
def _exact_e4m3() -> Iterator[None]:
    with exact_e4m3():
        yield


@pytest.mark.parametrize(
    ("capability", "has_fp8"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_a_gpu_with_fp8_products_rounds_the_inputs_that_a_checkpoint_rounds(
    capability: tuple[int, int], has_fp8: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert [GPU.keeps(FP8, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [has_fp8] * 2 + [
        False
    ]
    for method, rounds in (("fp8_tensor", has_fp8), ("ct_fp8_channel", False), ("int8", False)):
        stored = stored_tensors(resolve_model(str(make_quantised("llama", method, tmp_path)[0])))
        kept = kept_formats(stored, GPU, torch.bfloat16)
        assert {each.rounds_inputs for each in kept.values()} == {rounds}
        assert kept.keys() == stored.keys()


def test_a_compressed_checkpoint_says_whether_activations_are_rounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    folder = make_quantised("llama", "ct_fp8_channel", tmp_path)[0]
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    (folder / "config.json").write_text(json.dumps(config))
    kept = kept_formats(stored_tensors(resolve_model(str(folder))), GPU, torch.bfloat16)
    assert {each.rounds_inputs for each in kept.values()} == {True}


def loaded(kind: GroupFormat, scales: tuple[float | None, ...]) -> tuple[Linear, list[GroupTensor]]:
    """Load a layer with a part for each scale of the inputs."""
    names = tuple(f"part{i}" for i in range(len(scales)))
    formats = {f"{name}.weight": kind for name in names}
    build = BuildContext(dtype=torch.float32, device=torch.device("cpu"), max_model_len=16, block_formats=formats)
    linear = Linear(LinearSpec(in_features=SIZE, outs=(32,) * len(names), names=names, bias=True), build)
    weights = [replace(random_groups(kind, 32, SIZE, seed=i), input_scale=scale) for i, scale in enumerate(scales)]
    stored: dict[str, object] = {f"{name}.weight": weight for name, weight in zip(names, weights, strict=True)}
    for slot in linear.weight_slots():
        slot.load(stored.get(slot.name, torch.ones(slot.shape)))
    linear.finish_loading()
    return linear, weights


@pytest.mark.parametrize(
    ("scales", "used"),
    [
        ((0.01, 0.01), 0.01),
        ((0.01, 0.02), None),
        ((0.01, None), None),
        ((None, None), None),
        ((0.01,), 0.01),
    ],
)
def test_one_scale_of_all_inputs_is_used_if_all_parts_have_it(
    scales: tuple[float | None, ...], used: float | None
) -> None:
    linear, weights = loaded(FP8, scales)
    assert isinstance(linear.method, GroupMethod)
    assert linear.method.rounds_inputs
    x = 4 * random(3, SIZE)
    largest = x.abs().amax(1, keepdim=True) / 448 if used is None else torch.tensor(used)
    rounded = (x * (1 / largest)).clamp(-448, 448).to(torch.float8_e4m3fn).double() * largest.double()
    values = torch.cat([expand_groups(weight, torch.float64) for weight in weights])
    torch.testing.assert_close(linear(x).double(), rounded @ values.t() + 1, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", [replace(FP8, rounds_inputs=False), replace(FP8, group_size=64)], ids=str)
def test_other_weights_take_inputs_of_16_bits(kind: GroupFormat) -> None:
    """The checkpoint has weights alone in FP8, or groups that no FP8 kernel multiplies."""
    linear, (weight,) = loaded(kind, (0.01,))
    assert isinstance(linear.method, GroupMethod)
    assert not linear.method.rounds_inputs
    x: Tensor = random(3, SIZE)
    torch.testing.assert_close(linear(x), x @ expand_groups(weight, torch.float32).t() + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "is_wide", "rounds"),
    [
        (FP8, False, True),
        (replace(FP8, group_size=128), False, True),
        (replace(FP8, group_size=64), False, False),
        (replace(FP8, rounds_inputs=False), False, False),
        (FP8, True, False),
    ],
)
def test_a_plan_knows_which_layers_round_their_inputs_and_expand_no_weight(
    kind: GroupFormat, is_wide: bool, rounds: bool
) -> None:
    """A wide layer, which is multiplied in fp32, does neither."""
    build = BuildContext(
        dtype=torch.float16, device=torch.device("meta"), max_model_len=16, block_formats={"part.weight": kind}
    )
    spec = LinearSpec(in_features=SIZE, outs=(32,), names=("part",), wide=is_wide)
    method = Linear(spec, build).method
    assert isinstance(method, GroupMethod)
    assert method.rounds_inputs == rounds
    assert method.expanded_bytes == (0 if rounds or is_wide else 32 * SIZE * 2)
